"""Routes that answer with what a handler would get: the same with the fast path and without it."""

import asyncio
import json

from marserve.backend.protocol import Buffer, Input, Prediction
from marserve.frontend.batching.jobs import OnAnswer
from marserve.frontend.errors import PayloadTooLarge
from marserve.frontend.http.request_bodies import is_form, plain_input, read_input
from marserve.frontend.http.requests import HttpRequest, PlainRequest
from marserve.frontend.http.responses import HttpResponse, prediction_response
from marserve.frontend.http.router import Route, Submit

#: The longest body. One with the word "refuse" in it is refused, too.
MAX_BYTES = 600_000


def _prediction_of(input_: Input) -> Prediction:
    parts = [[part.name, part.content_type, bytes(part.body).decode("latin-1")]
             for part in input_.parts]  # fmt: skip
    document = {"headers": input_.headers, "parts": parts}
    return Prediction(json.dumps(document, ensure_ascii=True, indent=1).encode())


class _Ticket:
    def __init__(self, handle: asyncio.Handle) -> None:
        self.cancel = handle.cancel


def _accept(request: PlainRequest) -> Submit | None:
    if is_form(request.headers.get("content-type", "")) or request.length > MAX_BYTES:
        return None

    def submit(body: Buffer, on_answer: OnAnswer) -> _Ticket:
        if b"refuse" in bytes(body):
            raise PayloadTooLarge(7)
        prediction = _prediction_of(plain_input(request, body, {"added": "here"}))
        return _Ticket(asyncio.get_running_loop().call_soon(on_answer, prediction))

    return submit


async def _serve(request: HttpRequest) -> HttpResponse:
    input_ = await read_input(request, MAX_BYTES, {"added": "here"})
    if b"refuse" in b"".join(bytes(part.body) for part in input_.parts):
        raise PayloadTooLarge(7)
    return prediction_response(_prediction_of(input_))


ROUTES = {"model": Route(_serve, accept=_accept), "other": Route(_serve)}
