"""The bytes of a request for a prediction, built once and sent many times."""

from collections.abc import Mapping

from marserve.tools.bench.errors import BenchError
from marserve.tools.bench.payloads import Payload


def request_bytes(path: str, host: str, headers: Mapping[str, str], payload: Payload) -> bytes:
    """A POST over HTTP/1.1.

    Args:
        path: The request's target.
        host: What the ``Host`` header says.
        headers: Beside ``Host`` and those of the body; a content type here goes before.
        payload: The body.

    Raises:
        BenchError: The path or a header cannot be sent.
    """
    length = {"Content-Length": str(len(payload.body))}
    all_headers = {"Host": host, **with_content_type(headers, payload), **length}
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in all_headers.items())]
    if any(not line.isprintable() for line in lines) or " " in path:
        raise BenchError("A path or a header with blanks or control characters cannot be sent.")
    try:
        head = "\r\n".join([*lines, "", ""]).encode("latin-1")
    except UnicodeEncodeError:
        raise BenchError("A path or a header with such letters cannot be sent.") from None
    return head + payload.body


def with_content_type(headers: Mapping[str, str], payload: Payload) -> Mapping[str, str]:
    """The headers, with the payload's content type unless they have one."""
    if any(name.lower() == "content-type" for name in headers):
        return headers
    return {"Content-Type": payload.content_type, **headers}
