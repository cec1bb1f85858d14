"""A stand-in for vLLM, which needs a GPU: the parts of it that the handler uses.

Its model answers with the words of the prompt, one piece each.
"""

import argparse
import asyncio
import json
import sys
from types import ModuleType, SimpleNamespace

__path__: list[str] = []


class AsyncEngineArgs(SimpleNamespace):
    @classmethod
    def from_cli_args(cls, options):
        return cls(**vars(options))


class AsyncLLMEngine:
    model_config = vllm_config = None

    def __init__(self, engine_args) -> None:
        self.args = engine_args
        self.loop = asyncio.get_running_loop()

    from_engine_args = classmethod(lambda cls, engine_args: cls(engine_args))

    async def get_supported_tasks(self):
        return ("generate",)


class App:
    def __init__(self) -> None:
        self.state = SimpleNamespace()

    async def __call__(self, scope, receive, send) -> None:
        engine = self.state.engine
        assert asyncio.get_running_loop() is engine.loop
        if scope["path"] == "/v1/models":
            await say(send, 200, {"data": [{"id": engine.args.model}]})
            return
        request = json.loads((await receive())["body"])
        if request.get("model") != engine.args.model:
            await say(send, 404, {"error": {"message": "no such model"}})
        elif request.get("stream"):
            await stream(send, request["prompt"])
        else:
            text = request["prompt"].upper()
            await say(send, 200, {"choices": [{"text": text}], "seqs": engine.args.max_num_seqs})


async def say(send, status, content) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(content).encode()})


async def stream(send, prompt) -> None:
    headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for word in [*prompt.split(), "[DONE]"]:
        event = f"data: {word}\n\n".encode()
        await send({"type": "http.response.body", "body": event, "more_body": True})
        await asyncio.sleep(0)
    await send({"type": "http.response.body"})


def make_arg_parser(parser):
    parser.add_argument("--model")
    parser.add_argument("--served-model-name", nargs="+")
    parser.add_argument("--lora-modules", nargs="+")
    parser.add_argument("--chat-template")
    parser.add_argument("--max-num-seqs", type=int)
    parser.add_argument("--tensor-parallel-size", type=int)
    return parser


def build_app(args, supported_tasks=None, model_config=None):
    return App()


async def init_app_state(engine_client, state, args, supported_tasks=None) -> None:
    state.engine = engine_client


def provide(name, **members) -> None:
    module = ModuleType(name)
    module.__dict__.update(members, __path__=[])
    sys.modules[name] = module


provide("vllm.utils")
provide("vllm.utils.argparse_utils", FlexibleArgumentParser=argparse.ArgumentParser)
provide("vllm.entrypoints")
provide("vllm.entrypoints.openai")
provide("vllm.entrypoints.openai.cli_args", make_arg_parser=make_arg_parser)
provide("vllm.entrypoints.openai.api_server", build_app=build_app, init_app_state=init_app_state)
