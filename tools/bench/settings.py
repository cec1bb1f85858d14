"""Sets a model as a point asks for, and puts it back at the end, come what may.

marserve changes batching while it serves. TorchServe has to unregister the model and register the
same archive again; so has marserve for what holds for the life of a worker (threads of torch,
batches outstanding), and for another precision, which the archive's model-config.yaml says.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from marserve.tools.bench.errors import BenchError
from marserve.tools.bench.measurement import Point
from marserve.tools.bench.model_server import ModelServer, ServedModel
from marserve.tools.bench.points import WITH_GOAL

#: A precision that nobody wants: what holds while one archive is replaced by another.
_IN_BETWEEN = "\0"
_USUAL_PRECISION = "fp32"
_READY_SECONDS = 60.0  # for stragglers: who registers or scales has waited already
_POLL_SECONDS = 0.05

#: The URL of an archive that says a precision; None for what it says itself.
ArchiveFor = Callable[[str | None], str]


@dataclass(frozen=True)
class _Wanted:
    """What is to be served, in the words of the interface."""

    batching: dict[str, str]
    registered: dict[str, str]
    scale: dict[str, int]
    precision: str | None

    @property
    def min_workers(self) -> int:
        return self.scale["min_worker"]


def _parameters(point: Point) -> dict[str, str]:
    """What a point asks of batching, in the words of the interface."""
    return _texts(
        {
            "batch_size": point.batch_size,
            "max_batch_delay": point.max_batch_delay_ms,
            "batch_policy": point.batch_policy,
            "max_latency_ms": point.max_latency_ms,
        }
    )


def _registered(point: Point) -> dict[str, str]:
    """What a point asks of a registration, which cannot be changed afterwards."""
    return _texts(
        {
            "torch_threads": point.torch_threads,
            "outstanding_batches": point.outstanding_batches,
        }
    )


def _texts(values: Mapping[str, int | float | str | None]) -> dict[str, str]:
    numbers = {
        name: f"{value:.0f}" for name, value in values.items() if isinstance(value, int | float)
    }
    return numbers | {name: value for name, value in values.items() if isinstance(value, str)}


def _agree(batching: dict[str, str], point: Point) -> None:
    """A goal makes the policy adaptive, and marserve bears one beside no other policy."""
    if "batch_policy" in batching:
        if point.max_latency_ms is not None and point.batch_policy is None:
            batching["batch_policy"] = WITH_GOAL
        elif batching["batch_policy"] != WITH_GOAL:
            batching["max_latency_ms"] = f"{point.max_latency_ms or 0:.0f}"


@contextmanager
def served_settings(
    server: ModelServer, archive_for: ArchiveFor | None = None, *, register: bool = False
) -> Iterator["ServedSettings"]:
    """A context in which points can be set; what was served before it is served after it.

    Args:
        server: Serves the model.
        archive_for: Where the model comes from for a precision; None where it cannot be changed.
        register: Whether the model is there for the duration of the context only.

    Raises:
        BenchError: There is no such model; or, at the end, what was set cannot be put back.
    """
    with ExitStack() as undo:
        if register:
            assert archive_for is not None
            _check_free(server)
            # First: who gives up waiting for a slow model leaves a server that registers it.
            undo.callback(_put_back, lambda: _unregister(server))
            server.register(archive_for(None), initial_workers=1)
        settings = ServedSettings(server, archive_for)
        if not register:
            undo.callback(_put_back, settings.put_back)
        yield settings


def _put_back(undo: Callable[[], None]) -> None:
    try:
        undo()
    except BenchError as error:
        raise BenchError(f"What was set could not be put back: {error}") from error


def _check_free(server: ModelServer) -> None:
    if server.find() is not None:
        raise BenchError(
            f"A model named {server.model} is served already: leave out --register, or choose "
            "another name."
        )


def _unregister(server: ModelServer) -> None:
    if (now := server.find()) is not None:
        server.unregister(now.version)


class ServedSettings:
    """A model whose settings can be changed, and what they were.

    Args:
        server: Serves the model.
        archive_for: Where the model comes from for a precision; None where it cannot be changed.

    Attributes:
        original: What was served in the beginning.
    """

    def __init__(self, server: ModelServer, archive_for: ArchiveFor | None = None) -> None:
        self._server = server
        self._archive_for = archive_for
        self._precision: str | None = None
        self.original = server.describe()

    def put_back(self) -> None:
        """Set what was set in the beginning.

        Raises:
            BenchError: The server does not.
        """
        self._set(self._wanted(Point()))

    def set(self, point: Point) -> None:
        """Set what a point asks for.

        Raises:
            BenchError: The server does not, or does something else.
        """
        wanted = self._wanted(point)
        self._set(wanted)
        self._wait_ready(wanted.min_workers)
        self._check(wanted)
        if wanted.precision is not None:
            self._check_precision(wanted.precision)

    def _wanted(self, point: Point) -> _Wanted:
        batching, scale = {**self.original.batching}, {**self.original.scale}
        for parameter, value in _parameters(point).items():
            if parameter not in batching:
                raise BenchError(f"This server knows nothing of {parameter}; marserve does.")
            batching[parameter] = value
        _agree(batching, point)
        registered = {**self.original.registered, **_registered(point)}
        if not self.original.is_live and registered:
            raise BenchError(f"This server knows nothing of {min(registered)}; marserve does.")
        if point.workers is not None:
            scale = dict.fromkeys(scale, point.workers)
        return _Wanted(batching, registered, scale, point.precision)

    def _set(self, wanted: _Wanted) -> None:
        now = self._server.find()
        if now is None or wanted.precision != self._precision or self._is_fixed(now, wanted):
            now = self._register_again(now, wanted)
        if now.batching != wanted.batching and now.is_live:
            self._server.change(**wanted.batching)
        if now.scale != wanted.scale:
            self._server.change(**wanted.scale)

    def _is_fixed(self, now: ServedModel, wanted: _Wanted) -> bool:
        """Whether something is to be changed that cannot be while the model is served."""
        is_live = now.is_live and now.registered == wanted.registered
        return not is_live and (now.batching, now.registered) != (
            wanted.batching,
            wanted.registered,
        )

    def _register_again(self, now: ServedModel | None, wanted: _Wanted) -> ServedModel:
        archive = self._archive_of(wanted.precision)
        if now is not None:
            self._precision = _IN_BETWEEN
            self._server.unregister(now.version)
        self._server.register(
            archive,
            initial_workers=wanted.min_workers,
            response_timeout=self.original.response_timeout,
            **wanted.batching,
            **wanted.registered,
        )
        self._precision = wanted.precision
        return self._server.describe()

    def _archive_of(self, precision: str | None) -> str:
        if precision is None:
            return self.original.archive
        if not self.original.is_live:
            raise BenchError("This server knows nothing of precision; marserve does.")
        if self._archive_for is None:
            raise BenchError(
                "To sweep over precision, bench has to write it into the archive: "
                "give the archive's path with --register."
            )
        return self._archive_for(precision)

    def _wait_ready(self, count: int) -> None:
        deadline = time.monotonic() + _READY_SECONDS
        while (now := self._server.describe()).ready_workers < count:
            if time.monotonic() > deadline:
                reason = f" {now.last_error}" if now.last_error else ""
                raise BenchError(f"Only {now.ready_workers} of {count} workers are ready.{reason}")
            time.sleep(_POLL_SECONDS)

    def _check(self, wanted: _Wanted) -> None:
        """In TorchServe an archive's model-config.yaml wins against a registration."""
        now = self._server.describe()
        have = {**now.batching, **now.registered, **now.scale}
        for name, value in {**wanted.batching, **wanted.registered, **wanted.scale}.items():
            if have.get(name) != value:
                raise BenchError(
                    f"The server was told {name}={value} and keeps {have.get(name)}: "
                    "the archive's model-config.yaml may say so."
                )

    def _check_precision(self, wanted: str) -> None:
        """A handler with an ``initialize`` of its own may never look at what the archive says."""
        metadata = self._server.handler_metadata().get("optimization")
        precision = metadata.get("precision") if isinstance(metadata, dict) else None
        if precision == wanted or (precision is None and wanted == _USUAL_PRECISION):
            return
        raise BenchError(
            f"The archive says precision {wanted}, and its handler "
            f"{'nothing of it' if precision is None else precision}: one with an initialize of its "
            "own has to call BaseHandler's, or to report in its description what it does."
        )
