"""Forms (application/x-www-form-urlencoded), as they are and repeated to a large body."""

from urllib.parse import parse_qsl

from fuzz.http_door import exchange
from fuzz.limits import Limits, slowdown

from marserve.backend.protocol import Input
from marserve.frontend.http.request_bodies import read_input
from marserve.frontend.http.requests import HttpRequest
from marserve.frontend.http.responses import HttpResponse
from marserve.frontend.http.router import Route

LIMITS = Limits(calls=60_000, calls_per_byte=100, seconds=0.5, memory=16 << 20)
#: For how long, in CPU time, the event loop may stand still.
MAX_STEP = 0.1
_LARGE_BYTES = 1 << 20
# A collection of garbage that falls into a step may take as long in a process with much in it.
_TRIES = 3


def target(data: bytes) -> None:
    """Fields are those of Python's own parser, and no body stops the event loop."""
    input_, status = _read(data)
    if input_ is None:
        assert status in (400, 413)
    elif b";" not in data:
        _compare(data, input_)
    if data:
        repeated = (data + b"&") * (_LARGE_BYTES // (len(data) + 1))
        _read(repeated)


def _compare(data: bytes, input_: Input) -> None:
    fields = {part.name: bytes(part.body) for part in input_.parts}
    data = data.removesuffix(b"\n" if not data.endswith(b"\r\n") else b"\r\n")
    # As text: of bytes it takes ASCII only.
    pairs = parse_qsl(data.decode("latin-1"), keep_blank_values=True, encoding="latin-1")
    expected = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in pairs]
    last = data.rpartition(b"&")[2]
    if b"=" not in last and last:  # a text that is no form has no field
        expected.pop()
    assert fields == {name.decode("utf-8", "replace"): value for name, value in expected if name}


def _read(body: bytes) -> tuple[Input | None, int]:
    return read_form(body, b"application/x-www-form-urlencoded")


def read_form(body: bytes, content_type: bytes) -> tuple[Input | None, int]:
    """Send a body to a listener; return what a model would get of it, and the status."""
    found: list[Input] = []

    async def serve(request: HttpRequest) -> HttpResponse:
        found.append(await read_input(request, 1 << 24, {}))
        return HttpResponse(200)

    head = b"POST /a HTTP/1.1\r\nHost: h\r\nConnection: close\r\nContent-Type: %b\r\n"
    raw = head % content_type + b"Content-Length: %d\r\n\r\n" % len(body) + body
    for _ in range(_TRIES):
        answers = exchange([raw], {"a": Route(serve)})
        step = answers.longest_step / slowdown()
        if step < MAX_STEP:
            break
    else:
        raise AssertionError(f"the loop stood still for {step:.3f} s")
    [(_, _, status)] = answers.requests
    return (found[0] if found else None), status
