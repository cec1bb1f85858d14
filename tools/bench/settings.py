"""Applies the settings of points to a model, and restores the original settings at the end.

marserve changes batching while it serves the model. In TorchServe, the model has to be unregistered
and its archive registered again; in marserve only for threads of torch and outstanding batches,
which are fixed for the life of a worker, and for the precision in the archive's model-config.yaml.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from urllib.parse import urlencode

from marserve.frontend.configuration.model_schema import LIVE
from marserve.frontend.configuration.setting_kinds import AUTOMATIC
from marserve.tools.bench.errors import BenchError
from marserve.tools.bench.measurement import Point
from marserve.tools.bench.model_server import ModelServer, ServedModel
from marserve.tools.bench.points import SERVER_ROWS

_LIVE = frozenset(row.parameter for row in LIVE)
#: Settings that exclude a batch size in the same request, but not in a later one.
_EXCLUDING = frozenset({"batchable", "allow_auto_batching"})
_USUAL_PRECISION = "fp32"
_GOAL = "max_latency_ms"
# Seconds for workers to load, also after an error: the server starts failed workers again.
_LOADING_SECONDS = 600.0
_FAILING_SECONDS = 60.0
_POLL_SECONDS = 0.05

#: Returns the URL of the archive with a precision; None selects the unchanged archive.
ArchiveFor = Callable[[str | None], str]


@dataclass(frozen=True)
class _Wanted:
    """The settings to apply, by parameter of the management interface.

    Attributes:
        changes: Changes of the model as it was originally.
        registered: Settings that only a registration can set, where they differ from the original.
    """

    changes: Mapping[str, str]
    registered: Mapping[str, str]
    scale: Mapping[str, int]
    precision: str | None

    @property
    def min_workers(self) -> int:
        return self.scale["min_worker"]


def _parameters(point: Point) -> dict[str, str]:
    """Return the settings of a point by parameter."""
    values = {row.parameter: getattr(point, name) for name, row in SERVER_ROWS.items()}
    return {
        name: value if isinstance(value, str) else f"{value:.0f}"
        for name, value in values.items()
        if value is not None
    }


def _live(settings: Mapping[str, str]) -> dict[str, str]:
    """Return the settings that marserve changes while it serves the model."""
    return {name: text for name, text in settings.items() if name in _LIVE}


def _in_steps(settings: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Yield settings for successive requests, at least for one.

    Of settings that exclude each other in a request, both may have been set by successive ones.
    """
    size = "batch_size"
    if size not in settings or not _EXCLUDING & settings.keys():
        yield {**settings}
        return
    yield {name: text for name, text in settings.items() if name != size}
    yield {size: settings[size]}


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


def _left(original: ServedModel, now: ServedModel | None, name: str) -> str:
    """Return in sentences how a model differs from the original; empty if it does not."""
    if now is None:
        query = urlencode({"url": original.archive, "model_name": name, **original.chosen})
        return f"{name} is not served any more: register it again, with POST /models?{query}"
    have = {**now.settings, **now.scale}
    # Without the chosen ones, the same model-config.yaml and server decide those of workers.
    wanted = {**original.chosen, **_live(original.settings), **original.scale}
    others = {
        setting: f"{setting}={have.get(setting)} instead of {value}"
        for setting, value in wanted.items()
        if not _is_same(have.get(setting), value)
    }
    sentences = [f"{name} has {', '.join(others.values())}."] if others else []
    if changed := ", ".join(sorted((now.chosen.keys() ^ original.chosen.keys()) - others.keys())):
        sentences.append(f"A request has set {changed}, or no longer does.")
    return " ".join(sentences)


def _is_same(have: object, wanted: object) -> bool:
    return str(have).lower() == str(wanted).lower()  # a hint is in any case


def _unregister(server: ModelServer) -> None:
    if (now := server.find()) is not None:
        server.unregister(now.version)


class ServedSettings:
    """Changes the settings of a model and restores the original ones.

    A point is what its settings make of the original model: an earlier change is taken back before
    the next one.

    Args:
        server: Serves the model.
        archive_for: Returns the archive for a precision; None if it cannot be changed.

    Attributes:
        original: The description of the model before any change.
    """

    def __init__(self, server: ModelServer, archive_for: ArchiveFor | None = None) -> None:
        self._server = server
        self._archive_for = archive_for
        self.original = server.describe()
        # The precision and settings that the model is registered with, and its changes since then;
        # None while the server changes them.
        self._registered: tuple[str | None, Mapping[str, str]] | None = (None, {})
        self._changes: Mapping[str, str] | None = {}

    def put_back(self) -> None:
        """Restore the original settings.

        Raises:
            BenchError: The server refuses a change, or describes other settings afterwards; the
                message lists these.
        """
        original, refusal = self.original, ""
        try:
            self._set(self._wanted(Point()))
        except BenchError as error:
            refusal = f"{error} "
            chosen = {name: text for name, text in original.chosen.items() if name != _GOAL}
            if len(chosen) < len(original.chosen):  # it may be below the costs learnt meanwhile
                self.original = replace(original, chosen=chosen)
                with suppress(BenchError):
                    self._set(self._wanted(Point()))
        left = _left(original, self._server.find(), self._server.model)
        if refusal or left:
            raise BenchError(f"{refusal}{left}".rstrip())

    def set(self, point: Point) -> None:
        """Apply the settings of a point.

        Raises:
            BenchError: The server refuses a change, or describes other settings afterwards.
        """
        wanted = self._wanted(point)
        self._set(wanted)
        wait_ready(self._server, wanted.min_workers)
        self._check({**_parameters(point), **wanted.scale}, self._server.describe())
        if wanted.precision is not None:
            self._check_precision(wanted.precision)

    def _wanted(self, point: Point) -> _Wanted:
        original, changes, registered = self.original, dict[str, str](), dict[str, str]()
        for name, text in _parameters(point).items():
            if not original.is_live and (name not in original.settings or text == AUTOMATIC):
                named = f"{name}={text}" if text == AUTOMATIC else name
                raise BenchError(f"This server does not support {named}; marserve does.")
            if original.is_live and name in _LIVE:
                changes[name] = text
            elif original.settings.get(name) != text:
                registered[name] = text
        scale = original.scale
        if point.workers is not None:
            scale = dict.fromkeys(scale, point.workers)
        return _Wanted(changes, registered, scale, point.precision)

    def _set(self, wanted: _Wanted) -> None:
        now = self._server.find()
        if now is None or self._registered != (wanted.precision, wanted.registered):
            now = self._register_again(now, wanted)
        if self.original.is_live and self._changes != wanted.changes:
            self._changes = None
            self._take_back(now)
            if wanted.changes:
                self._server.change(**wanted.changes)
            self._changes = wanted.changes
        if now.scale != wanted.scale:
            self._server.change(**wanted.scale)

    def _take_back(self, now: ServedModel) -> None:
        """Restore what requests had set, and unset the rest."""
        wanted = _live(self.original.chosen)
        if _live(now.chosen) == wanted:
            return
        # In each step, because it would set what its settings imply.
        unset = {"unset": ",".join(others)} if (others := sorted(_LIVE - wanted.keys())) else {}
        for step in _in_steps(wanted):
            self._server.change(**step, **unset)

    def _register_again(self, now: ServedModel | None, wanted: _Wanted) -> ServedModel:
        archive = self._archive_of(wanted.precision)
        if self.original.obstacle:
            raise BenchError(
                f"{self._server.model} {self.original.obstacle}, which a registration cannot set: "
                "only settings that can be changed while it is served can be tried."
            )
        if now is not None:
            self._server.unregister(now.version)  # refused for the default one of several versions
        self._registered = self._changes = None
        # `_take_back` sets the rest.
        first, *_ = _in_steps({**self.original.chosen, **wanted.registered})
        self._server.register(archive, initial_workers=wanted.min_workers, **first)
        self._registered = (wanted.precision, wanted.registered)
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

    def _check(self, wanted: Mapping[str, str | int], now: ServedModel) -> None:
        """Check the settings: TorchServe prefers model-config.yaml to those of a registration."""
        have = {**now.settings, **now.scale}
        for name, value in wanted.items():
            if not _is_same(have.get(name), value):
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
