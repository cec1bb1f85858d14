"""A stand-in for an engine's server, with a few options of ``vllm serve``, on aiohttp.

It echoes texts: a completion is the prompt in capital letters, a stream one event for each word.
A prompt ``wait`` is never answered, ``die`` ends the process, ``break`` ends the stream early. The
answer to ``flood`` has 40 MB, in a stream as numbered events; that to ``done`` has 10 MB of last
events. While the file STAND_IN_METRICS contains ``silent`` or ``flood``, so do the metrics.
"""

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path

from aiohttp import web

parser = argparse.ArgumentParser(prog="vllm serve")
parser.add_argument("model")
parser.add_argument("--uds")
parser.add_argument("--port", type=int)
parser.add_argument("--served-model-name", nargs="+", default=["any"])
parser.add_argument("--lora-modules", nargs="+", default=[])
parser.add_argument("--enable-lora", action="store_true")
parser.add_argument("--max-num-seqs", type=int)
parser.add_argument("--tensor-parallel-size", type=int)
parser.add_argument("--silent-metrics", action="store_true", help="never answer /metrics")
parser.add_argument("--flood-metrics", action="store_true", help="answer /metrics with 40 MB")
parser.add_argument("--fail-after", type=float, help="seconds until it ends, never ready")
METRICS = Path(os.environ.get("STAND_IN_METRICS", os.devnull))
EVENTS = 40_000
PADDING = b"x" * 983


class Engine:
    def __init__(self, options) -> None:
        self.options = options
        adapters = [text.partition("=")[0] for text in options.lora_modules]
        self.names = [*options.served_model_name, *adapters]
        self.tokens = self.running = self.sent = 0

    async def health(self, _request):
        if self.options.fail_after is not None:
            print("There is no device.", file=sys.stderr)
            os._exit(3)
        return web.Response()

    async def models(self, _request):
        return web.json_response({"data": [{"id": name} for name in self.names]})

    async def metrics(self, request):
        fault = METRICS.read_text()  # noqa: ASYNC240 - one word
        if self.options.silent_metrics or fault == "silent":
            await asyncio.Event().wait()
        if self.options.flood_metrics or fault == "flood":
            return await self.flood(request, "text/plain")
        return web.Response(
            text="# HELP stand_in:tokens_total Tokens.\n# TYPE stand_in:tokens_total counter\n"
            f'stand_in:tokens_total{{engine="0"}} {self.tokens}\n'
            "# HELP stand_in:running Requests.\n# TYPE stand_in:running gauge\n"
            f"stand_in:running {self.running}\n"
            f"stand_in:sent_bytes {self.sent}\n"
            "# TYPE process_cpu_seconds_total counter\nprocess_cpu_seconds_total 1.0\n"
        )

    async def complete(self, request):
        body = await request.read()
        document = json.loads(body)
        if document["model"] not in self.names:
            return web.json_response({"error": {"message": "no such model"}}, status=404)
        prompt = document["prompt"]
        self.running += 1
        try:
            if prompt == "die":
                os._exit(4)
            if prompt == "wait" and not document.get("stream"):
                await asyncio.Event().wait()
            if prompt == "flood" and not document.get("stream"):
                return await self.flood(request, "application/json")
            self.tokens += len(prompt.split())
            if document.get("stream"):
                return await self.stream(request, prompt)
            about = {
                "text": prompt.upper(),
                "options": vars(self.options),
                "body": body.decode(),
                "request_id": request.headers["x-request-id"],
                "traceparent": request.headers.get("traceparent"),
                "pid": os.getpid(),
                "api_key": os.environ.get("VLLM_API_KEY"),
            }
            return web.json_response(about)
        finally:
            self.running -= 1

    async def flood(self, request, media_type):
        response = web.StreamResponse(headers={"content-type": media_type})
        await response.prepare(request)
        for number in range(EVENTS):
            await response.write(b"data: %09d%b\n\n" % (number, PADDING))
            self.sent += 1000
        return response

    async def stream(self, request, prompt):
        if prompt == "flood":
            return await self.flood(request, "text/event-stream")
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for word in prompt.split():
            await response.write(f"data: {word}\n\n".encode())
            if word == "wait":
                await asyncio.Event().wait()
            if word == "die":
                os._exit(4)
            if word == "break":
                request.transport.abort()
            if word == "done":
                for _ in range(10_000):
                    await response.write(b"data: [DONE]\n\n" + b" " * 986)
        await response.write(b"data: [DONE]\n\n")
        return response


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if arguments[0] == "serve":
        del arguments[0]
    engine = Engine(parser.parse_args(arguments))
    print("The stand-in starts.")
    application = web.Application()
    application.add_routes(
        [
            web.get("/health", engine.health),
            web.get("/v1/models", engine.models),
            web.get("/metrics", engine.metrics),
            web.post("/v1/completions", engine.complete),
        ]
    )
    web.run_app(
        application,
        path=engine.options.uds,
        host="127.0.0.1" if engine.options.port else None,
        port=engine.options.port,
        handler_cancellation=True,
        print=None,
    )
