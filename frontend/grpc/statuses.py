"""Errors in gRPC: a status code, and TorchServe's text.

The text is the message and, on a second line, the name of TorchServe's class, or the text that
TorchServe has in its place.
"""

from typing import NamedTuple

from grpc import StatusCode

from marserve.frontend.errors import ListTooLong, MethodNotAllowed, NeverFits, QueueFull, ServeError

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
_BY_CLASS = {2: StatusCode.OK, 4: StatusCode.FAILED_PRECONDITION, 5: StatusCode.INTERNAL}
#: The reverse: the status of a call in the metrics of responses.
_HTTP_STATUSES = {code: status for status, code in _CODES.items()} | {
    StatusCode.OK: 200,
    StatusCode.FAILED_PRECONDITION: 400,
    StatusCode.RESOURCE_EXHAUSTED: 429,
}
#: The packages of TorchServe's classes that are not in its package ``http``.
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
# Clients accept 8 KiB of metadata, which contain the text; each byte may be encoded as three.
_MAX_TEXT_BYTES = 2048


class GrpcStatus(NamedTuple):
    """The status of a failed call, or of a failed request of a stream."""

    code: StatusCode
    message: str
    reason: str  # the name of TorchServe's class; empty for none

    @property
    def text(self) -> str:
        """The details of the status of the call."""
        message = sendable(self.message)
        return f"{message}\n{self.reason}" if self.reason else message


def sendable(text: str) -> str:
    """Return the text of an error without lone surrogates, cut at 2 KiB.

    It may contain text of a handler or a client.
    """
    data = text.encode("utf-8", "backslashreplace")
    if len(data) <= _MAX_TEXT_BYTES:
        return data.decode()
    return data[:_MAX_TEXT_BYTES].decode("utf-8", "ignore") + "..."


class _ModelApiDisabled(ServeError, status=403, wire_type="ModelException"):
    pass


def status_of(error: ServeError) -> GrpcStatus:
    """Return the status of an error, which is answered."""
    error.drop_frames()
    if isinstance(error, MethodNotAllowed):  # only of a model API that is disabled
        error = _ModelApiDisabled("Model API disabled")
    package = _PACKAGES.get(error.wire_type, "http")
    reason = f"org.pytorch.serve.{package}.{error.wire_type}"
    code = code_of(error.status)
    if isinstance(error, QueueFull):
        code = StatusCode.RESOURCE_EXHAUSTED
    elif isinstance(error, ListTooLong | NeverFits):  # clients repeat RESOURCE_EXHAUSTED
        code = StatusCode.INVALID_ARGUMENT
    return GrpcStatus(code, error.message, reason)


def code_of(http_status: int) -> StatusCode:
    """Return the code of an HTTP status."""
    by_class = _BY_CLASS.get(http_status // 100, StatusCode.UNKNOWN)
    return _CODES.get(http_status, by_class)


def number_of(code: StatusCode) -> int:
    """Return the number of a code."""
    number: int = code.value[0]
    return number


def http_status_of(code: StatusCode) -> int:
    """Return the HTTP status of a code."""
    return _HTTP_STATUSES.get(code, 500)
