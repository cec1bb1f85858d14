"""The bytes of a request for a prediction, built once and sent many times."""

from collections.abc import Mapping

from marserve.tools.bench.errors import BenchError
from marserve.tools.bench.payloads import Payload


def request_bytes(path: str, host: str, headers: Mapping[str, str], payload: Payload) -> bytes:
    """Return the bytes of an HTTP/1.1 POST.

    Args:
        path: The request's target.
        host: Value of the ``Host`` header.
        headers: Further headers; a content type here replaces the payload's.
        payload: The body.

    Raises:
        BenchError: The path or a header contains characters that cannot be sent.
    """
    length = {"Content-Length": str(len(payload.body))}
    all_headers = {"Host": host, **with_content_type(headers, payload), **length}
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in all_headers.items())]
    if any(not line.isprintable() for line in lines) or " " in path:
        raise BenchError("A path or a header with blanks or control characters cannot be sent.")
    try:
        head = "\r\n".join([*lines, "", ""]).encode("latin-1")
    except UnicodeEncodeError:
        raise BenchError("A path or a header with letters beyond Latin-1 cannot be sent.") from None
    return head + payload.body


def with_content_type(headers: Mapping[str, str], payload: Payload) -> Mapping[str, str]:
    """Return the headers, with the payload's content type if they have none."""
    if any(name.lower() == "content-type" for name in headers):
        return headers
    return {"Content-Type": payload.content_type, **headers}
