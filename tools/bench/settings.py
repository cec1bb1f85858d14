"""Applies the settings of points to a model, and restores the original settings at the end.

marserve changes batching while it serves the model. In TorchServe, the model has to be unregistered
and its archive registered again; in marserve only for threads of torch and outstanding batches,
which are fixed for the life of a worker, and for the precision in the archive's model-config.yaml.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from marserve.frontend.configuration.setting_kinds import AUTOMATIC
from marserve.tools.bench.errors import BenchError
from marserve.tools.bench.measurement import Point
from marserve.tools.bench.model_server import ModelServer, ServedModel
from marserve.tools.bench.points import SERVER_ROWS, WITH_GOAL

#: The precision while one archive is replaced by another; equals no precision of a point.
_NO_ARCHIVE = "\0"
_USUAL_PRECISION = "fp32"
# Seconds for workers to load, also after an error: the server starts failed workers again.
_LOADING_SECONDS = 600.0
_FAILING_SECONDS = 60.0
_POLL_SECONDS = 0.05

#: Returns the URL of the archive with a precision; None selects the unchanged archive.
ArchiveFor = Callable[[str | None], str]


@dataclass(frozen=True)
class _Wanted:
    """The settings to apply, by parameter of the management interface."""

    batching: dict[str, str]
    registered: dict[str, str]
    scale: dict[str, int]
    precision: str | None

    @property
    def min_workers(self) -> int:
        return self.scale["min_worker"]


def _parameters(point: Point, *, is_live: bool) -> dict[str, str]:
    """Return the settings of a point that are live, or that only a registration can set."""
    values = {
        row.parameter: getattr(point, name)
        for name, row in SERVER_ROWS.items()
        if row.is_live is is_live
    }
    return {
        name: value if isinstance(value, str) else f"{value:.0f}"
        for name, value in values.items()
        if value is not None
    }


def _reconcile_goal(batching: dict[str, str], point: Point) -> None:
    """Make policy and latency goal consistent: marserve accepts a goal only for "adaptive"."""
    if "batch_policy" in batching:
        if point.max_latency_ms is not None and point.batch_policy is None:
            batching["batch_policy"] = WITH_GOAL
        elif batching["batch_policy"] != WITH_GOAL:
            batching["max_latency_ms"] = f"{point.max_latency_ms or 0:.0f}"


@contextmanager
def served_settings(
    server: ModelServer, archive_for: ArchiveFor | None = None, *, register: bool = False
) -> Iterator["ServedSettings"]:
    """Return a context in which points can be set; its end restores the original settings.

    Args:
        server: Serves the model.
        archive_for: Returns the archive for a precision; None if it cannot be changed.
        register: Whether to register the model, and unregister it at the end.

    Raises:
        BenchError: The model is not served; or, at the end, the settings cannot be restored.
    """
    with ExitStack() as undo:
        if register:
            assert archive_for is not None
            _check_free(server)
            # Before the registration: after an interrupt the server still finishes it.
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
        raise BenchError(f"The original settings could not be restored: {error}") from error


def _check_free(server: ModelServer) -> None:
    if server.find() is not None:
        raise BenchError(
            f"A model named {server.model} is already served: omit --register, or choose another "
            "name."
        )


def wait_ready(server: ModelServer, count: int) -> None:
    """Wait until this number of workers can take requests.

    Raises:
        BenchError: They are not ready in time.
    """
    began = time.monotonic()
    while (now := server.describe()).ready_workers < count:
        limit = _FAILING_SECONDS if now.last_error else _LOADING_SECONDS
        if time.monotonic() > began + limit:
            reason = f" {now.last_error}" if now.last_error else ""
            raise BenchError(f"Only {now.ready_workers} of {count} workers are ready.{reason}")
        time.sleep(_POLL_SECONDS)


def _unregister(server: ModelServer) -> None:
    if (now := server.find()) is not None:
        server.unregister(now.version)


class ServedSettings:
    """Changes the settings of a model and restores the original ones.

    Args:
        server: Serves the model.
        archive_for: Returns the archive for a precision; None if it cannot be changed.

    Attributes:
        original: The description of the model before any change.
    """

    def __init__(self, server: ModelServer, archive_for: ArchiveFor | None = None) -> None:
        self._server = server
        self._archive_for = archive_for
        self._precision: str | None = None
        self.original = server.describe()
        self._registered = self.original.registered

    def put_back(self) -> None:
        """Restore the original settings.

        Raises:
            BenchError: The server refuses a change.
        """
        self._set(self._wanted(Point()))

    def set(self, point: Point) -> None:
        """Apply the settings of a point.

        Raises:
            BenchError: The server refuses a change, or describes other settings afterwards.
        """
        wanted = self._wanted(point)
        self._set(wanted)
        wait_ready(self._server, wanted.min_workers)
        self._check(wanted)
        if wanted.precision is not None:
            self._check_precision(wanted.precision)

    def _wanted(self, point: Point) -> _Wanted:
        batching, scale = {**self.original.batching}, {**self.original.scale}
        for parameter, value in _parameters(point, is_live=True).items():
            if parameter not in batching or (value == AUTOMATIC and not self.original.is_live):
                named = f"{parameter}={value}" if value == AUTOMATIC else parameter
                raise BenchError(f"This server does not support {named}; marserve does.")
            batching[parameter] = value
        _reconcile_goal(batching, point)
        registered = {**self.original.registered, **_parameters(point, is_live=False)}
        if not self.original.is_live and registered:
            raise BenchError(f"This server does not support {min(registered)}; marserve does.")
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
        """Whether a setting changes that cannot be changed while the model is served."""
        is_live = now.is_live or now.batching == wanted.batching
        return not is_live or wanted.registered != self._registered

    def _register_again(self, now: ServedModel | None, wanted: _Wanted) -> ServedModel:
        archive = self._archive_of(wanted.precision)
        if now is not None:
            self._precision = _NO_ARCHIVE
            self._server.unregister(now.version)
        self._server.register(
            archive,
            initial_workers=wanted.min_workers,
            response_timeout=self.original.response_timeout,
            **wanted.batching,
            **wanted.registered,
        )
        self._precision, self._registered = wanted.precision, wanted.registered
        return self._server.describe()

    def _archive_of(self, precision: str | None) -> str:
        if precision is None:
            return self.original.archive
        if not self.original.is_live:
            raise BenchError("This server does not support precision; marserve does.")
        if self._archive_for is None:
            raise BenchError(
                "To sweep over precision, bench has to write it into the archive: "
                "give the archive's path with --register."
            )
        return self._archive_for(precision)

    def _check(self, wanted: _Wanted) -> None:
        """Check the settings: TorchServe prefers model-config.yaml to those of a registration."""
        now = self._server.describe()
        have = {**now.batching, **now.registered, **now.scale}
        for name, value in {**wanted.batching, **wanted.registered, **wanted.scale}.items():
            if have.get(name) != value:
                raise BenchError(
                    f"The server keeps {name}={have.get(name)} instead of {value}: the archive's "
                    "model-config.yaml may set it."
                )

    def _check_precision(self, wanted: str) -> None:
        """Check the handler's precision: a custom ``initialize`` may ignore model-config.yaml."""
        metadata = self._server.handler_metadata().get("optimization")
        precision = metadata.get("precision") if isinstance(metadata, dict) else None
        if precision == wanted or (precision is None and wanted == _USUAL_PRECISION):
            return
        raise BenchError(
            f"The archive sets precision {wanted}, but its handler reports "
            f"{'none' if precision is None else precision}: a handler that overrides initialize "
            "has to call BaseHandler's, or to report its precision in its description."
        )
