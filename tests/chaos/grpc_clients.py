"""Clients over gRPC: unary calls, answers in a stream, sequences in a stream of both.

Calls have no deadline: grpc computes the time that is left by the wall clock of Python, which a run
moves, and the end by that of the system.
"""

import asyncio
import time
from random import Random
from typing import Any

import grpc
from grpc_client import GrpcClient, PredictionsRequest

from chaos.http_client import Answer
from chaos.rules import ANSWER_SECONDS, Outcome
from chaos.served import Request, Served, make_request
from chaos.world import World, pick

_THINK = 0.1
_OPTIONS = [
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 300),
]
_STATUSES = {
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.INTERNAL: 500,
    grpc.StatusCode.ABORTED: 409,
    grpc.StatusCode.FAILED_PRECONDITION: 418,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
    grpc.StatusCode.NOT_FOUND: 404,
}
# What is INTERNAL over gRPC, and has a status of its own over HTTP.
_BY_TEXT = {"has no worker": 503, "Out of resources": 507}


class _Caller:
    """One channel, and what came over it."""

    def __init__(self, world: World, channel: grpc.aio.Channel) -> None:
        self._world = world
        self._client = GrpcClient(channel)
        self._is_new = True

    async def predict(self, request: Request, name: str) -> None:
        """A call with one request, answered by one message or a stream of them."""
        method = self._client.method("inference", name)
        answering = method(_message(request))
        since, body = time.monotonic(), bytearray()
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                if name == "Predictions":
                    body += (await answering).prediction
                else:
                    async for response in answering:
                        body += response.prediction
        except TimeoutError:
            self._judge(request, Outcome(since, time.monotonic(), None, "late"))
        except grpc.RpcError as error:
            self._failed(request, since, error.code(), error.details(), has_begun=bool(body))
        else:
            self._answered(request, since, Answer(200, body=body))

    async def predict_in_sequence(self, model: Served, rng: Random) -> None:
        """A stream with the requests of one sequence, each sent after the answer to the last."""
        id_, last = self._world.token("sequence"), rng.randint(1, 8)
        call = self._client.method("inference", "StreamPredictions2")()
        for step in range(1, last + 1):
            request = make_request(model, self._world.token("call"), rng, step=step)
            message = _message(request, sequence_id=id_)
            message.input["ts_request_sequence_end"] = str(step == last).lower().encode()
            since = time.monotonic()
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    await call.write(message)
                    response = await call.read()
            except TimeoutError:
                self._judge(request, Outcome(since, time.monotonic(), None, "late"))
                call.cancel()
                return
            except (grpc.RpcError, asyncio.InvalidStateError):  # the latter if it has ended before
                response = grpc.aio.EOF
            if response is grpc.aio.EOF:
                self._failed(request, since, await call.code(), await call.details())
                return
            if response.HasField("status") and response.status.code:
                code = next(each for each in _STATUSES if each.value[0] == response.status.code)
                self._answered(request, since, _failure(code, response.status.message))
                break
            self._answered(request, since, Answer(200, body=bytearray(response.prediction)))
            await asyncio.sleep(rng.uniform(0, _THINK))
        await call.done_writing()
        while await call.read() is not grpc.aio.EOF:
            self._world.referee.violation(f"{model.name}: a message that nobody asked for")

    def _answered(self, request: Request, since: float, answer: Answer) -> None:
        self._is_new = False
        self._judge(request, Outcome(since, time.monotonic(), answer))

    def _failed(
        self,
        request: Request,
        since: float,
        code: Any,
        text: str | None,
        *,
        has_begun: bool = False,
    ) -> None:
        details = text or ""
        if has_begun:
            lost = f"broken off {details}"
        elif "org.pytorch" in details:  # the server has answered
            self._answered(request, since, _failure(code, details))
            return
        else:
            lost = f"connection lost: {code} {details}"
        self._judge(request, Outcome(since, time.monotonic(), None, lost, self._is_new))
        self._is_new = self._is_new or not has_begun

    def _judge(self, request: Request, outcome: Outcome) -> None:
        self._world.referee.outcome(request, outcome, "grpc ")


async def keep_calling(world: World, rng: Random) -> None:
    """A client of all models in turn, until it is over."""
    address = f"127.0.0.1:{world.server.grpc_ports['inference']}"
    models = [model for model in world.models if model.is_plain]
    async with grpc.aio.insecure_channel(address, options=_OPTIONS) as channel:
        caller = _Caller(world, channel)
        while not world.over.is_set():
            model = pick(rng, models)
            try:
                if model.form == "sequence":
                    await caller.predict_in_sequence(model, rng)
                else:
                    request = make_request(model, world.token("call"), rng)
                    name = pick(rng, ("Predictions", "StreamPredictions"))
                    await caller.predict(request, name)
            except (grpc.RpcError, asyncio.InvalidStateError):
                pass  # of the end of a stream, whose requests are judged
            await asyncio.sleep(rng.uniform(0, _THINK))


def _message(request: Request, **fields: str) -> Any:
    model = request.model
    return PredictionsRequest(
        model_name=model.workflow or model.name, input={"body": request.body}, **fields
    )


def _failure(code: Any, text: str) -> Answer:
    found = [status for part, status in _BY_TEXT.items() if part in text]
    return Answer((found or [_STATUSES.get(code, 0)])[0], body=bytearray(text.encode()))
