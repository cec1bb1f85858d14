"""Snapshots of the served models, written after every change and restored at start.

A snapshot is a configuration file, ``<yyyyMMddHHmmssSSS>-<kind>.cfg`` with mode 0600, of every key
that was set and ``model_snapshot`` (`saved_models`). The newest of each kind are kept.
"""

import asyncio
import contextlib
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from marserve.frontend.aio.background import DaemonThreads
from marserve.frontend.atomic_file import replace_file
from marserve.frontend.configuration.model_entry import ModelEntry
from marserve.frontend.configuration.model_schema import REGISTERED
from marserve.frontend.configuration.properties import format_properties
from marserve.frontend.configuration.saved_models import SAVED, snapshot_json
from marserve.frontend.errors import ServerBusy
from marserve.frontend.serving.model_version import ModelVersion
from marserve.frontend.serving.registry import ModelRegistry
from marserve.frontend.settings.batching_settings import sizes_to_try
from marserve.frontend.settings.layers import CHOSEN, SERVER, attributes_of

logger = logging.getLogger(__name__)

# A change of the models is answered after this time even if the disk hangs.
_MAX_WAIT_SECONDS = 5.0
# Between two attempts to write a snapshot, in seconds.
_RETRY_SECONDS = 5.0
_ALWAYS_SAVED = ("is_automatic", "delay", "response_timeout", "startup_timeout")


class RestoreFailed(Exception):
    """The models of a snapshot cannot be served; the text is for the operator."""


def served_models(registry: ModelRegistry, model_store: Path) -> list[ModelEntry]:
    """Return the registered models, and those of an earlier snapshot that could not be loaded.

    If one of these was the default, it becomes so again when it can be loaded.
    """
    defaults = set(registry.defaults())
    models = [model for model in registry if not model.origin.workflow]
    served = [_saved(model, model in defaults, model_store) for model in models]
    return served + [load.saved for load in registry.failed if load.saved]


def _saved(model: ModelVersion, is_default: bool, model_store: Path) -> ModelEntry:
    settings, batching = model.settings, model.settings.batching
    values, origins = settings.values, settings.origins
    chosen = [row for row in SAVED if origins.get(row.name, SERVER) != SERVER]
    archive = model.archive.source  # perhaps a directory outside the store
    if archive.is_relative_to(model_store):
        archive = archive.relative_to(model_store)
    return ModelEntry(
        name=model.name,
        version=model.version,
        is_default=is_default,
        url=str(archive),
        handler=model.origin.handler,
        runtime=model.manifest.runtime,
        workers=(model.workers.min_workers, model.workers.max_workers),
        settings={
            **{name: values[name] for name in (*_ALWAYS_SAVED, *attributes_of(chosen))},
            "size": model.batcher.size if batching.is_automatic else batching.size,
        },
        parallel_level=settings.parallel.level if settings.parallel else 0,
        set_by_requests=tuple(row.key for row in REGISTERED if origins.get(row.name) in CHOSEN),
        batch_costs=tuple(model.batcher.costs.points) if sizes_to_try(batching) else (),
    )


@dataclass(eq=False)
class SnapshotWriter:
    """Writes snapshots with these properties, and keeps the newest of each kind; blocks."""

    directory: Path
    properties: Mapping[str, str]
    kept: int
    clock: Callable[[], float] = time.time
    _last_ms: int = field(default=0, init=False)

    def write(self, kind: str, models: Iterable[ModelEntry]) -> Path:
        """Write a snapshot of the kind startup, snapshot or shutdown.

        Raises:
            OSError: It cannot be written; no part of it is left.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        # The last one is restored, so the times must increase: also of two changes within a
        # millisecond, and after a restart with a clock that was set back.
        latest_ms = max(_written_ms(self.directory), default=0)
        created_ms = max(int(self.clock() * 1000), self._last_ms + 1, latest_ms + 1)
        while (path := self.directory / f"{_stamp(created_ms)}-{kind}.cfg").exists():
            created_ms += 1
        self._last_ms = created_ms
        snapshot = snapshot_json(path.name, created_ms, models)
        date = time.strftime("%a %b %d %H:%M:%S %Z %Y", time.localtime(created_ms / 1000))
        entries = {**self.properties, "model_snapshot": snapshot}
        text = format_properties(entries, ("Saving snapshot", date))
        replace_file(path, text.encode("ascii"))
        os.utime(path, ns=(created_ms * 10**6,) * 2)
        self._remove_old(kind)
        return path

    def _remove_old(self, kind: str) -> None:
        # Incomplete files of killed servers begin with a dot, and are removed first.
        ours = re.compile(rf"\.?\d{{17}}-{kind}\.cfg(\.\w+\.new)?")
        old = sorted(path for path in self.directory.iterdir() if ours.fullmatch(path.name))
        for path in old[: -self.kept]:
            path.unlink(missing_ok=True)


def _written_ms(directory: Path) -> Iterator[int]:
    for file in directory.glob("[0-9]" * 17 + "-*.cfg"):
        with contextlib.suppress(OSError):  # a dangling link, or removed meanwhile
            yield file.stat().st_mtime_ns // 10**6


def _stamp(epoch_ms: int) -> str:
    seconds, milliseconds = divmod(epoch_ms, 1000)
    return f"{time.strftime('%Y%m%d%H%M%S', time.localtime(seconds))}{milliseconds:03d}"


@dataclass(eq=False)
class Snapshots:
    """Writes snapshots in a thread, one after the other; none without a writer.

    One that cannot be written is tried again until it is, so that a server that is killed later
    does not restore an older state.

    Nothing is written before `begin`, so that a failed start does not replace the snapshots of the
    last successful one.
    """

    writer: SnapshotWriter | None
    models: Callable[[], list[ModelEntry]]
    _thread: DaemonThreads | None = field(default=None, init=False)
    _failed: bool = field(default=False, init=False)  # logged once, until one succeeds again
    _retry: asyncio.TimerHandle | None = field(default=None, init=False)

    async def begin(self) -> None:
        """Write the first snapshot, when the server has started."""
        if self.writer is not None:
            self._thread = DaemonThreads("snapshots", 1)
        await self._save("startup")

    async def save(self) -> None:
        """Write a snapshot, when the models have changed."""
        await self._save("snapshot")

    async def end(self) -> None:
        """Write the last snapshot, when the server is about to stop."""
        await self._save("shutdown")
        self._thread = None
        if self._retry is not None:
            self._retry.cancel()

    async def _save(self, kind: str) -> None:
        writing = self._begin_writing(kind)
        if writing is None:
            return
        await asyncio.wait({writing}, timeout=_MAX_WAIT_SECONDS)
        if writing.done():
            writing.result()
        else:
            logger.warning("A snapshot takes more than %g s.", _MAX_WAIT_SECONDS)

    def _begin_writing(self, kind: str) -> asyncio.Future[None] | None:
        """Start to write; None if nothing is written."""
        if self._thread is None:
            return None
        try:
            writing = asyncio.wrap_future(self._thread.submit(self._write, kind, self.models()))
        except ServerBusy as error:  # the disk hangs
            logger.error("A snapshot was not written. %s", error)  # noqa: TRY400 - no traceback
            return None
        writing.add_done_callback(lambda _: self._retry_later())
        return writing

    def _retry_later(self) -> None:
        if self._failed and self._retry is None and self._thread is not None:
            loop = asyncio.get_running_loop()
            self._retry = loop.call_later(_RETRY_SECONDS, self._write_again)

    def _write_again(self) -> None:
        self._retry = None
        if self._failed:  # no change of a model has been written meanwhile
            self._begin_writing("snapshot")

    def _write(self, kind: str, models: list[ModelEntry]) -> None:
        assert self.writer is not None
        try:
            path = self.writer.write(kind, models)
        except OSError as error:
            if not self._failed:
                logger.error("Snapshots cannot be written; the server continues: %s", error)  # noqa: TRY400 - no traceback
            self._failed = True
            return
        self._failed = False
        logger.info("Snapshot %s: %d model versions.", path, len(models))
