"""One request of a batch, as handlers see it, and what they say about its answer."""

from typing import Any


class RequestProcessor:
    """One request's headers, and what the handler has to say about its answer.

    Args:
        request_header: Header name, in the client's spelling, to value. Values are str, but for
            the entries named after a parameter: those are ``{"content-type": …}``.
    """

    __slots__ = ("_reason_phrase", "_request_header", "_response_header", "_status_code")

    def __init__(self, request_header: dict[str, Any]) -> None:
        self._request_header = request_header
        self._status_code = 200
        self._reason_phrase: str | None = None
        self._response_header: dict[str, str] = {}

    def get_request_property(self, key: str) -> Any:
        """Return one request header, None if the client did not send it."""
        return self._request_header.get(key)

    def get_request_properties(self) -> dict[str, Any]:
        """Return all request headers."""
        return self._request_header

    def report_status(self, code: int, reason_phrase: str | None = None) -> None:
        """Choose the status line of the answer."""
        self._status_code = code
        self._reason_phrase = reason_phrase

    def get_response_status_code(self) -> int:
        """Return the status of the answer, 200 unless the handler chose another."""
        return self._status_code

    def get_response_status_phrase(self) -> str | None:
        """Return the reason phrase of the answer, None for the usual one of its status."""
        return self._reason_phrase

    def add_response_property(self, key: str, value: str) -> None:
        """Set a response header; the last value of a key wins.

        Raises:
            TypeError: The key or the value is not a str. Said here, where the traceback shows the
                line that is wrong; TorchServe's worker died of it after the handler was done.
        """
        if not isinstance(key, str) or not isinstance(value, str):
            raise TypeError(
                f"A response header is a str with a str value, not {key!r}: {value!r} "
                f"({type(value).__name__}); convert the value with str()"
            )
        self._response_header[key] = value

    def get_response_headers(self) -> dict[str, str]:
        """Return all response headers set so far."""
        return self._response_header

    def get_response_header(self, key: str) -> str | None:
        """Return one response header, None if it was not set."""
        return self._response_header.get(key)
