"""Failures as gRPC has them: a status code, and the text that TorchServe's clients know.

The text is the message and, on a line of its own, the name of TorchServe's class, or what
TorchServe puts there instead.
"""

from typing import NamedTuple

from grpc import StatusCode

from marserve.frontend.errors import ServeError

#: By HTTP status, as TorchServe translates it.
_CODES = {
    400: StatusCode.INVALID_ARGUMENT,
    401: StatusCode.UNAUTHENTICATED,
    403: StatusCode.PERMISSION_DENIED,
    404: StatusCode.NOT_FOUND,
    409: StatusCode.ABORTED,
    413: StatusCode.RESOURCE_EXHAUSTED,
    416: StatusCode.OUT_OF_RANGE,
    429: StatusCode.RESOURCE_EXHAUSTED,
    499: StatusCode.CANCELLED,
    501: StatusCode.UNIMPLEMENTED,
    503: StatusCode.UNAVAILABLE,
    504: StatusCode.DEADLINE_EXCEEDED,
}
_BY_CLASS = {
    2: StatusCode.OK,
    4: StatusCode.FAILED_PRECONDITION,
    5: StatusCode.INTERNAL,
}
#: And back: what a call counts as in the metrics of responses.
_HTTP_STATUSES = {code: status for status, code in _CODES.items()} | {
    StatusCode.OK: 200,
    StatusCode.FAILED_PRECONDITION: 400,
    StatusCode.RESOURCE_EXHAUSTED: 429,
}
#: TorchServe's packages, of the classes that are not in its package ``http``.
_PACKAGES = {
    "DownloadArchiveException": "archive",
    "InvalidKeyException": "archive.model",
    "InvalidModelException": "archive.model",
    "ModelException": "archive.model",
    "ModelNotFoundException": "archive.model",
    "ModelVersionNotFoundException": "archive.model",
    "InvalidWorkflowException": "archive.workflow",
    "WorkflowException": "archive.workflow",
    "WorkflowNotFoundException": "archive.workflow",
    "WorkerInitializationException": "wlm",
}


# Clients take 8 KiB of metadata; the text of a status is there, and a byte may need three.
_MAX_TEXT_BYTES = 2048


class Failure(NamedTuple):
    """Why a call, or a request of a stream, failed."""

    code: StatusCode
    message: str
    reason: str  # the name of TorchServe's class; empty for none

    @property
    def text(self) -> str:
        """The details of the call's status."""
        message = sendable(self.message)
        return f"{message}\n{self.reason}" if self.reason else message


def sendable(text: str) -> str:
    """The text of an error as it can be sent: its beginning if it is long, and no lone surrogates.

    Whatever a handler raised or a client asked for may stand in it.
    """
    data = text.encode("utf-8", "backslashreplace")
    if len(data) <= _MAX_TEXT_BYTES:
        return data.decode()
    return data[:_MAX_TEXT_BYTES].decode("utf-8", "ignore") + "..."


def failure_of(error: ServeError) -> Failure:
    """The failure that an error is."""
    package = _PACKAGES.get(error.wire_type, "http")
    reason = f"org.pytorch.serve.{package}.{error.wire_type}"
    return Failure(code_of(error.status), error.message, reason)


def code_of(http_status: int) -> StatusCode:
    """The code for an HTTP status."""
    by_class = _BY_CLASS.get(http_status // 100, StatusCode.UNKNOWN)
    return _CODES.get(http_status, by_class)


def number_of(code: StatusCode) -> int:
    """The number of a code, which is what is sent."""
    number: int = code.value[0]
    return number


def http_status_of(code: StatusCode) -> int:
    """The HTTP status that means the same."""
    return _HTTP_STATUSES.get(code, 500)
