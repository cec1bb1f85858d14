"""What can go wrong, with the status and TorchServe's word for it.

Every error a client may see is a `ServeError`: it carries its HTTP ``status`` and its
``wire_type``, the ``type`` member of the error body that TorchServe's clients match on. Anything
else that reaches a transport is a defect of ours: the middleware answers 500 and the log gets the
traceback.

    ServeError
    ├── BadRequest                400  a parameter or a body is wrong
    ├── InvalidToken              400  (TorchServe's choice; clients know it, not 401)
    ├── ArchiveRefused            400  unsafe or unreadable archive, bad manifest
    ├── DownloadFailed            400
    ├── DependenciesFailed        400  a model's packages, or its virtual environment
    ├── DefaultVersionInUse       403
    ├── ForeignOrigin             403  a web page asks an unguarded management listener
    ├── RouteNotFound             404
    ├── ModelNotFound             404
    ├── VersionNotFound           404
    ├── LoggerNotFound            404
    ├── MethodNotAllowed          405
    ├── VersionConflict           409
    ├── ChangeSuperseded          409  a later request to change the same model has won
    ├── PayloadTooLarge           413  the body is longer than max_request_size
    ├── ModelFileExists           500
    ├── NotEnoughDevices          500  a parallel worker wants more GPUs than there are
    ├── WorkersFailed             500  or what the worker reported while loading
    ├── WorkerDied                500
    ├── PredictionFailed          any  what a worker reported for a batch
    ├── WorkflowsNotServed        501
    ├── NoWorker                  503  also: queue full
    ├── Overloaded                503  not to be answered in time; tells when to try again
    ├── ServerStopping            503
    └── RequestExpired            504  TorchServe left such clients without an answer
"""

import math


class ServeError(Exception):
    """A failure that a client is told about.

    Args:
        message: One sentence for the client; an empty one is left out of the error body.
        status: HTTP status, where a single class covers several.
    """

    status = 500
    wire_type = "InternalServerException"

    def __init__(self, message: str = "", *, status: int | None = None) -> None:
        super().__init__(message)
        if status is not None:
            self.status = status

    @property
    def message(self) -> str:
        """The sentence for the client."""
        return str(self.args[0])


class BadRequest(ServeError):
    """A parameter or a body that cannot be used."""

    status = 400
    wire_type = "BadRequestException"


class InvalidToken(ServeError):
    """No token, a wrong one, or one past its time."""

    status = 400
    wire_type = "InvalidKeyException"


class ArchiveRefused(ServeError):
    """An archive that is unreadable, unsafe to unpack, or whose manifest is wrong."""

    status = 400
    wire_type = "InvalidModelException"


class DownloadFailed(ServeError):
    """The archive could not be fetched from its URL."""

    status = 400
    wire_type = "DownloadArchiveException"


class DependenciesFailed(ServeError):
    """The packages that a model asks for could not be installed."""

    status = 400
    wire_type = "ModelException"


class DefaultVersionInUse(ServeError):
    """The default version cannot be removed while others exist."""

    status = 403
    wire_type = "InvalidModelVersionException"


class ForeignOrigin(ServeError):
    """A web page, or an unknown host name, asks a management listener without tokens."""

    status = 403
    wire_type = "ForbiddenException"

    def __init__(self, found: str) -> None:
        super().__init__(
            f"Refused because of {found}: without tokens only programs on this machine may manage "
            "models, or ask one whose handler is debugged. Set disable_token_authorization in "
            "config.properties to decide about the former yourself."
        )


class RouteNotFound(ServeError):
    """No such path on this listener."""

    status = 404
    wire_type = "ResourceNotFoundException"

    def __init__(self) -> None:
        super().__init__("Requested resource is not found, please refer to API document.")


class ModelNotFound(ServeError):
    """No model of that name, or no archive at that URL."""

    status = 404
    wire_type = "ModelNotFoundException"


class VersionNotFound(ServeError):
    """The model exists, that version of it does not."""

    status = 404
    wire_type = "ModelVersionNotFoundException"


class LoggerNotFound(ServeError):
    """No logger of that name."""

    status = 404
    wire_type = "ResourceNotFoundException"


class MethodNotAllowed(ServeError):
    """The path exists, not with this method."""

    status = 405
    wire_type = "MethodNotAllowedException"

    def __init__(self) -> None:
        super().__init__("Requested method is not allowed, please refer to API document.")


class VersionConflict(ServeError):
    """That version of that model is registered already."""

    status = 409
    wire_type = "ConflictStatusException"


class ChangeSuperseded(ServeError):
    """What was asked for a model is not waited for: a later request asked for something else."""

    status = 409
    wire_type = "ConflictStatusException"


class PayloadTooLarge(ServeError):
    """The body is longer than max_request_size.

    Args:
        limit: The longest that is allowed, in bytes.
    """

    status = 413
    wire_type = "PayloadTooLargeException"

    def __init__(self, limit: int) -> None:
        super().__init__(f"The request body is longer than max_request_size ({limit} bytes).")


class ModelFileExists(ServeError):
    """A download would overwrite a file in the model store."""

    status = 500


class NotEnoughDevices(ServeError):
    """A parallel model's workers take more GPUs each than it may use."""

    status = 500
    wire_type = "WorkerInitializationException"

    def __init__(self, model: str, level: int) -> None:
        super().__init__(f"No enough gpu devices for model:{model} parallelLevel:{level}")


class WorkersFailed(ServeError):
    """Workers that were asked for did not come up."""

    status = 500


class WorkerDied(ServeError):
    """The worker ended, or had to be ended, while it held the request.

    Args:
        cause: Why, a sentence; empty where that is not known.
    """

    status = 500

    def __init__(self, cause: str = "") -> None:
        super().__init__(f"Worker died. {cause}".rstrip())  # TorchServe's words, and ours


class PredictionFailed(ServeError):
    """What a worker reported for a whole batch; ``status`` is the worker's."""


class WorkflowsNotServed(ServeError):
    """Somebody asks for a workflow; there are only models."""

    status = 501
    wire_type = "NotImplementedException"

    def __init__(self) -> None:
        super().__init__(
            "Workflows are not served yet: this is marserve, not TorchServe. Register the models "
            "of the workflow one by one, and have the client call one after the other."
        )


class NoWorker(ServeError):
    """No worker to serve the request, or no seat left in the model's queue."""

    status = 503
    wire_type = "ServiceUnavailableException"


class Overloaded(ServeError):
    """More work is ahead of the request than its deadline allows.

    Args:
        seconds: After which another try may succeed; sent as ``Retry-After``.
    """

    status = 503
    wire_type = "ServiceUnavailableException"

    def __init__(self, seconds: float) -> None:
        super().__init__(
            "The request cannot be answered in time: "
            f"it would take about {max(1, math.ceil(seconds * 1000))} ms."
        )
        self.retry_after = max(1, math.ceil(seconds))


class ServerStopping(ServeError):
    """The server is on its way down and takes no new requests."""

    status = 503
    wire_type = "ServiceUnavailableException"

    def __init__(self) -> None:
        super().__init__("The server is stopping.")


class RequestExpired(ServeError):
    """The request's time was over before its prediction was there."""

    status = 504
    wire_type = "RequestTimeoutException"
