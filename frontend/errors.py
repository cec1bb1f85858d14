"""The errors of the server, with their status and TorchServe's type.

Every error that a client may see is a `ServeError`: it has an HTTP ``status`` and a ``wire_type``,
the ``type`` member of the error body, which TorchServe's clients compare. Any other exception that
reaches a transport is a defect: the client gets 500 and the log the traceback.

    ServeError
    ├── BadRequest                400  a parameter or a body is wrong
    ├── InvalidToken              400  as in TorchServe, whose clients do not expect 401
    ├── ArchiveRefused            400  unsafe or unreadable archive, bad manifest
    ├── DownloadFailed            400
    ├── DependenciesFailed        400  a model's packages, or its virtual environment
    ├── WorkflowRefused           400  a workflow's archive or its specification is wrong
    ├── GraphRefused              400  a workflow's nodes do not make a directed acyclic graph
    ├── DefaultVersionInUse       403
    ├── CatalogReadOnly           403  the models are those of a catalog
    ├── ForeignOrigin             403  without a key, and not from a program on this machine
    ├── RouteNotFound             404
    ├── ModelNotFound             404
    ├── VersionNotFound           404
    ├── WorkflowNotFound          404
    ├── MethodNotAllowed          405
    ├── Conflict                  409  another registration or change was first, or came later
    ├── VersionConflict           409
    ├── SequenceOver              409  the sequence of the request has ended
    ├── PayloadTooLarge           413  the body is longer than max_request_size
    ├── ListTooLong               413
    ├── EncodingNotSupported      415  the Content-Encoding of the body is not gzip or deflate
    ├── CallerGone                499  the request on whose behalf a handler calls has ended
    ├── NotEnoughDevices          500  a parallel worker needs more GPUs than the machine has
    ├── WorkersFailed             500  or the status that the worker reported while loading
    │   └── ModelUnfit            400  the model loads, but does not fit its settings
    ├── WorkerDied                500
    ├── PredictionFailed          any  the error that a worker reported for a batch
    ├── WorkflowFailed            500  a node could not be registered, or unregistered
    ├── NodeFailed                500  a node of a workflow failed in every attempt
    ├── ModelNotYetLoaded         503  the catalog has it, and this server is starting
    ├── NoWorker                  503
    ├── QueueFull                 503
    ├── TooMuchInFlight           503  the bytes in flight have reached their limit
    │   └── NeverFits             413  one request alone exceeds it
    ├── Overloaded                503  too much work is ahead of the request; has a Retry-After
    ├── ServerBusy                503  too much work of one kind is running or waiting
    ├── ServerStopping            503
    ├── RequestExpired            504  TorchServe does not answer such clients
    ├── NotEnoughMemory           507  a model is not loaded, because too little memory is left
    └── CyclicCall                508  handlers call each other's models in a circle
"""

import math

from marserve.backend.errors import FAILED, failed_request


def retry_after(seconds: float) -> int:
    """Return the value of the header Retry-After for a number of seconds."""
    return max(1, math.ceil(seconds))


class ServeError(Exception):
    """An error that is sent to a client.

    Args:
        message: One sentence for the client; an empty one is left out of the error body.
        status: HTTP status, where a single class covers several.
    """

    status = 500
    wire_type = "InternalServerException"
    #: Seconds after which a retry may succeed; None if that is unknown.
    retry_after: int | None = None

    def __init_subclass__(cls, status: int = 500, wire_type: str = wire_type) -> None:
        cls.status = status
        cls.wire_type = wire_type

    def __init__(self, message: str = "", *, status: int | None = None) -> None:
        super().__init__(message)
        if status is not None:
            self.status = status

    @property
    def message(self) -> str:
        """The sentence for the client."""
        return str(self.args[0])

    @property
    def reason(self) -> str:
        """The sentence for operators: the message, or the cause that clients do not get."""
        return self.message

    def drop_frames(self) -> None:
        """Remove the tracebacks of the error and of its causes; called when it is answered.

        Their frames refer to the request. If one of them also refers to the error, the request
        would stay in memory until the garbage collector runs.
        """
        error: BaseException | None = self
        while error is not None:
            error.__traceback__ = None
            error = error.__cause__ or error.__context__


class BadRequest(ServeError, status=400, wire_type="BadRequestException"):
    """A parameter or a body that cannot be used."""


class InvalidToken(ServeError, status=400, wire_type="InvalidKeyException"):
    """The key is missing, wrong or expired."""


class ArchiveRefused(ServeError, status=400, wire_type="InvalidModelException"):
    """An archive that is unreadable, unsafe to unpack, or whose manifest is wrong."""


class DownloadFailed(ServeError, status=400, wire_type="DownloadArchiveException"):
    """The archive could not be downloaded from its URL."""


class DependenciesFailed(ServeError, status=400, wire_type="ModelException"):
    """The packages that a model requires could not be installed."""


class WorkflowRefused(ServeError, status=400, wire_type="InvalidWorkflowException"):
    """A workflow's archive that is unsafe or unreadable, or whose manifest or yaml is wrong."""


class GraphRefused(ServeError, status=400, wire_type="InvalidDAGException"):
    """The nodes of a workflow do not make a directed acyclic graph with one start."""


class DefaultVersionInUse(ServeError, status=403, wire_type="InvalidModelVersionException"):
    """The default version cannot be removed while others exist."""


class CatalogReadOnly(ServeError, status=403, wire_type="CatalogException"):
    """The models are those of a catalog, which a server only reads."""

    def __init__(self, place: str) -> None:
        super().__init__(
            f"The models are those of the catalog {place}, which this server only reads. "
            "Change them there."
        )


class ForeignOrigin(ServeError, status=403, wire_type="ForbiddenException"):
    """A request without a key that a web page, a proxy or an unknown host name has sent."""

    def __init__(self, found: str) -> None:
        super().__init__(
            f"Refused because of {found}: without a key only programs on this machine may manage "
            "models, or use one whose handler is debugged. To manage models from elsewhere, send "
            "the management key of key_file.json, or set disable_token_authorization=true in "
            "config.properties and have a proxy decide who may."
        )


class RouteNotFound(ServeError, status=404, wire_type="ResourceNotFoundException"):
    """No such path on this listener, or no logger of that name."""

    def __init__(
        self, message: str = "Requested resource is not found, please refer to API document."
    ) -> None:
        super().__init__(message)


class ModelNotFound(ServeError, status=404, wire_type="ModelNotFoundException"):
    """No model of that name, or no archive at that URL."""


class VersionNotFound(ServeError, status=404, wire_type="ModelVersionNotFoundException"):
    """The model exists, but not the version."""


class ModelNotYetLoaded(ModelNotFound, status=503, wire_type="ServiceUnavailableException"):
    """The catalog has the model, or is not read yet; other servers may serve the model."""

    retry_after = 1


class WorkflowNotFound(ServeError, status=404, wire_type="WorkflowNotFoundException"):
    """No workflow of that name, or no archive at that URL."""


class MethodNotAllowed(ServeError, status=405, wire_type="MethodNotAllowedException"):
    """The path exists, but not with this method."""

    def __init__(self) -> None:
        super().__init__("Requested method is not allowed, please refer to API document.")


class Conflict(ServeError, status=409, wire_type="ConflictStatusException"):
    """Another registration or change of the same model or workflow takes precedence."""


class VersionConflict(Conflict, status=409, wire_type="ConflictStatusException"):
    """That version of that model is registered already."""


class SequenceOver(ServeError, status=409, wire_type="ConflictStatusException"):
    """The sequence of the request has ended, and its state is lost."""

    def __init__(self, sequence_id: str, why: str) -> None:
        super().__init__(
            f'Sequence "{sequence_id}" is over, and its state is lost: {why} '
            "Start again: with another id, or with the header that starts a sequence."
        )


class PayloadTooLarge(ServeError, status=413, wire_type="PayloadTooLargeException"):
    """The body is longer than max_request_size, the ``limit`` in bytes."""

    def __init__(self, limit: int, subject: str = "request body") -> None:
        super().__init__(f"The {subject} is longer than max_request_size ({limit} bytes).")


class EncodingNotSupported(ServeError, status=415, wire_type="UnsupportedMediaTypeException"):
    """The body has a Content-Encoding that is not decoded."""

    #: The value of Accept-Encoding in the answer.
    accepted = "gzip, deflate"

    def __init__(self, found: str) -> None:
        super().__init__(
            f"Content-Encoding {found[:80]!r} is not supported: use one of gzip, deflate and "
            "identity."
        )


class CallerGone(ServeError, status=499):
    """The request on whose behalf a handler calls a model has ended."""

    def __init__(self) -> None:
        super().__init__("The request on whose behalf the call was made has ended.")


class NotEnoughDevices(ServeError, status=500, wire_type="WorkerInitializationException"):
    """Each worker of a parallel model needs more GPUs than it may use."""

    def __init__(self, model: str, level: int) -> None:
        super().__init__(f"No enough gpu devices for model:{model} parallelLevel:{level}")


class WorkersFailed(ServeError, status=500):
    """Requested workers did not start."""


class ModelUnfit(WorkersFailed, status=400, wire_type="InvalidModelException"):
    """The model loads, but does not fit its settings (``validateBatching``)."""


class WorkerDied(ServeError, status=500):
    """The worker died, or was killed, while it had the request."""

    def __init__(self, cause: str = "") -> None:
        super().__init__(f"Worker died. {cause}".rstrip())  # TorchServe's text, and the cause


class PredictionFailed(ServeError):
    """The error that a worker reported for a batch; ``status`` is the worker's.

    ``cause`` is the exception of the handler, for operators; it may be empty.
    """

    def __init__(self, message: str, *, status: int | None = None, cause: str = "") -> None:
        super().__init__(message, status=status)
        self.cause = cause

    @property
    def reason(self) -> str:
        """The exception of the handler if it is known."""
        return self.cause or self.message

    def of(self, request_id: str) -> "PredictionFailed":
        """Return the error of one request of the batch, which names the log with the traceback."""
        if self.message != FAILED:
            return self
        message = failed_request(request_id)
        return PredictionFailed(message, status=self.status, cause=self.cause)


class WorkflowFailed(ServeError, status=500, wire_type="WorkflowException"):
    """Nodes of a workflow could not be registered, or unregistered."""


class NodeFailed(ServeError, status=500):
    """A node of a workflow failed in every attempt; ``cause`` is the last error.

    ``why`` follows the text that TorchServe has.
    """

    def __init__(self, node: str, cause: ServeError, why: str = "") -> None:
        super().__init__(f"Error executing {node}{why}")
        self.node = node
        self.cause = cause
        self._why = why

    @property
    def reason(self) -> str:
        """The node and the last error."""
        return self.message if self._why else f"{self.message}: {self.cause.reason}"


class NoWorker(ServeError, status=503, wire_type="ServiceUnavailableException"):
    """No worker serves the request; the message is TorchServe's, followed by ``why`` if known."""

    def __init__(self, message: str, why: str = "") -> None:
        super().__init__(f"{message.removesuffix('.')}. {why}" if why else message)
        self._why = why

    @property
    def reason(self) -> str:
        """Why no worker serves it."""
        return self._why or self.message


class QueueFull(NoWorker, status=503, wire_type="ServiceUnavailableException"):
    """The queue of the model is full; the message begins as that of `NoWorker`."""


class Overloaded(ServeError, status=503, wire_type="ServiceUnavailableException"):
    """Too much work is ahead of the request; try again after ``seconds``.

    Without a ``message`` it is more than the deadline allows.
    """

    def __init__(self, seconds: float, message: str = "") -> None:
        super().__init__(
            message
            or "The request cannot be answered in time: "
            f"it would take about {max(1, math.ceil(seconds * 1000))} ms."
        )
        self.retry_after = retry_after(seconds)


class ListTooLong(ServeError, status=413, wire_type="PayloadTooLargeException"):
    """A list has more items than the server accepts, the ``limit``."""

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"The list has more than {limit} items, which is the limit. Send several requests."
        )


class ServerBusy(ServeError, status=503, wire_type="ServiceUnavailableException"):
    """The limit of running and waiting work of one kind is reached."""


class TooMuchInFlight(ServeError, status=503, wire_type="ServiceUnavailableException"):
    """The clients of the listener, or this one, use as much memory as the ``limit`` allows."""

    retry_after: int | None = 1

    def __init__(self, limit: str) -> None:
        super().__init__(
            f"Too many bytes of requests and answers are on their way; {limit} allows no more. "
            "Try again later."
        )


class NeverFits(TooMuchInFlight, status=413, wire_type="PayloadTooLargeException"):
    """One request, with what is made of it, takes more memory than the ``limit`` allows to all."""

    retry_after = None

    def __init__(self, limit: str, count: int) -> None:
        ServeError.__init__(
            self,
            f"The request and what is made of it take more memory than {limit} ({count} bytes) "
            "allows, also without other requests.",
        )


class ServerStopping(ServeError, status=503, wire_type="ServiceUnavailableException"):
    """The server is stopping and accepts no new requests."""

    def __init__(self) -> None:
        super().__init__("The server is stopping.")


class RequestExpired(ServeError, status=504, wire_type="RequestTimeoutException"):
    """The timeout of the request has passed before its prediction was ready."""


class NotEnoughMemory(ServeError, status=507):
    """Too little memory is left to load a model or for a request; unregister another model."""


class CyclicCall(ServeError, status=508, wire_type="LoopDetectedException"):
    """A model would wait for itself, or the models that wait for each other are too many."""


def unexpected(error: Exception) -> ServeError:
    """Return the error for an unexpected exception: a defect, or too little memory."""
    if isinstance(error, MemoryError):
        return NotEnoughMemory("The server has not enough memory for this request.")
    return ServeError("Internal server error.")
