"""Read a catalog periodically and apply it, and write the changes of clients to it.

While a catalog is missing, unreachable or invalid, the last one that could be read stays in force,
and nothing is written: other servers may still serve it.
"""

import asyncio
import contextlib
import datetime as dt
import logging
import math
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar

from marserve.frontend.aio.background import BackgroundTasks, in_abandonable_thread
from marserve.frontend.aio.long_work import LongWork
from marserve.frontend.catalog.convergence import Convergence
from marserve.frontend.catalog.document import (
    Catalog,
    WrongCatalog,
    catalog_text,
    read_catalog,
)
from marserve.frontend.catalog.edits import Edit
from marserve.frontend.catalog.failed_steps import FailedStep
from marserve.frontend.catalog.file_store import FileStore
from marserve.frontend.catalog.http_store import HttpStore
from marserve.frontend.catalog.store import CatalogStore, Document, StoreConflict, StoreFailed
from marserve.frontend.configuration.config import Config
from marserve.frontend.errors import (
    CatalogReadOnly,
    CatalogUnavailable,
    Conflict,
    ServeError,
)
from marserve.frontend.logs.formats import one_line
from marserve.frontend.registration.manager import ModelManager
from marserve.frontend.serving.registry import ModelRegistry
from marserve.frontend.telemetry.metrics import CatalogMetrics, Metrics

T = TypeVar("T")

logger = logging.getLogger(__name__)

READ_ONLY, READ_WRITE = MODES = ("read-only", "read-write")
# Spreads the reads of replicas that were started together.
_JITTER = 0.2
_ATTEMPTS = 20
# Multiple of the store's timeout for which a change waits for its turn.
_TURNS = 3
# Models that converge at the same time: fewer processes unpack archives, and more than a hundred
# that wait for one would be refused.
_MAX_CONVERGING = 32
_MAX_LISTED = 100  # models in each list of a description
# Longer documents are parsed in a thread: a model that cannot be read takes up to 0.3 ms.
_SHORT_BYTES = 4096
_CONFLICT_PAUSE_SECONDS = 0.05


@dataclass(eq=False)
class Synchroniser:
    """Reads, applies and changes a catalog."""

    store: CatalogStore
    convergence: Convergence
    metrics: CatalogMetrics
    mode: str | None  # of `MODES`; None: as the store permits
    interval: float  # seconds between two reads
    timeout: float  # seconds of every call of the store

    def __post_init__(self) -> None:
        self._revision = ""
        self._read_at: dt.datetime | None = None  # last time that it was known to be up to date
        self._trouble = ""  # why it cannot be read now
        self._why_read_only = ""
        self._wake = asyncio.Event()
        # Reads and changes are sequential, so that an older catalog never replaces a newer one.
        self._turn = asyncio.Lock()
        self._background = BackgroundTasks()
        self._long_work = LongWork()
        self._converging = 0  # models, of at most `_MAX_CONVERGING`

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Apply and refresh the catalog within the block.

        Raises:
            OSError: It is configured to be written, and cannot be.
        """
        async with self._background:
            await self._decide_mode()
            await self._refresh()
            self._background.keep_running("The catalog", self._run)
            yield

    async def change(self, edit: Edit) -> None:
        """Write a change to the catalog, and make it the wanted one.

        Raises:
            CatalogReadOnly, CatalogUnavailable: It cannot be written, or not now.
            Conflict: Others changed it at every attempt.
            ServeError: The edit is not possible.
        """
        self.check_writable()
        for attempt in range(_ATTEMPTS):
            if attempt:
                await asyncio.sleep(random.uniform(0, 2 * _CONFLICT_PAUSE_SECONDS * attempt))  # noqa: S311 - no secret
            try:
                async with self._turn_in_time():
                    await self._edit(edit)
                    return
            except StoreConflict:
                continue
            except (StoreFailed, WrongCatalog) as error:
                self.metrics.write_failures.update(1)
                what = f"The catalog {self.store.place} cannot be changed now: {error}"
                raise CatalogUnavailable(what) from error
        raise Conflict(
            f"The catalog {self.store.place} was changed by others at each of {_ATTEMPTS} "
            "attempts to change it. Try again later."
        )

    async def converge(self, name: str) -> list[FailedStep]:
        """Make a model as wanted; return the steps that failed."""
        failures = await self.convergence.converge(name)
        self._wake.set()  # for the next retry
        return failures

    def start(self, work: Coroutine[Any, Any, T]) -> "asyncio.Future[T]":
        """Run a coroutine to its end, even if its caller is cancelled; may raise ServerStopping."""
        return self._background.start(work, _note)

    def check_writable(self) -> None:
        """Raise CatalogReadOnly unless this server changes the catalog."""
        if self._why_read_only:
            raise CatalogReadOnly(self.store.place, self._why_read_only)

    def describe(self) -> dict[str, Any]:
        """Return the state of the catalog and of its application, for operators."""
        now = asyncio.get_running_loop().time()
        failures, wrong = self.convergence.failures, self.convergence.wrong
        unconverged = self.convergence.unconverged()
        pending = chain(
            ({"modelName": name, "reason": reason} for name, reason in wrong.items()),
            (each.described(now) for name in failures for each in failures.of(name)),
        )
        return {
            "catalog": self.store.place,
            "mode": READ_ONLY if self._why_read_only else READ_WRITE,
            "revision": self._revision or None,
            "lastRead": self._read_at and self._read_at.isoformat(timespec="milliseconds"),
            "failure": self._trouble or None,
            "models": len(self.convergence.wanted or ()),
            "unconverged": len(unconverged),
            "pending": [*islice(pending, _MAX_LISTED)],
            "underWay": sorted(unconverged - failures.keys() - wrong.keys())[:_MAX_LISTED],
            "converged": self.convergence.wanted is not None and not unconverged,
        }

    async def _decide_mode(self) -> None:
        why = ""
        with contextlib.suppress(StoreFailed):  # the first change will fail
            why = await self._in_time(self.store.why_read_only())
        if self.mode == READ_WRITE and why:
            raise OSError(f"model_catalog_mode=read-write, and {self.store.place}: {why}.")
        changes = "changes of clients are written to it"
        if self.mode == READ_ONLY:
            why = f"model_catalog_mode={READ_ONLY}"
        if why:
            changes = f"it is read-only ({why}), so that clients cannot change models here"
        self._why_read_only = why
        logger.info("The models are those of the catalog %s; %s.", self.store.place, changes)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        next_read = loop.time() + self._pause()
        while True:
            now = loop.time()
            for name in self.convergence.due(now, _MAX_CONVERGING - self._converging):
                self._converging += 1
                self._background.start(self._converge_counted(name), _note)
            is_full = self._converging == _MAX_CONVERGING  # then one that ends wakes this loop
            next_due = math.inf if is_full else self.convergence.next_due()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(min(next_read, next_due)):
                    await self._wake.wait()
            self._wake.clear()
            if loop.time() >= next_read:
                await self._refresh()
                next_read = loop.time() + self._pause()

    async def _converge_counted(self, name: str) -> None:
        try:
            await self.converge(name)
        finally:
            self._converging -= 1
            self._wake.set()

    def _pause(self) -> float:
        return self.interval * random.uniform(1 - _JITTER, 1 + _JITTER)  # noqa: S311 - no secret

    async def _refresh(self) -> None:
        """Read the catalog, and apply it if it has changed."""
        async with self._turn:
            try:
                document = await self._in_time(self.store.read(self._revision))
                if document is not None:
                    catalog = await _parse(document, read_catalog, document.text)
            except (StoreFailed, WrongCatalog) as error:
                self.metrics.read_failures.update(1)
                reason = one_line(error)
                if reason != self._trouble:
                    known = "the last one that could be read stays" if self._revision else "waiting"
                    logger.error("The catalog %s: %s (%s)", self.store.place, reason, known)  # noqa: TRY400 - said in full
                self._trouble = reason
            else:
                if document is not None:
                    await self._apply(catalog, document.revision)
                self._has_been_read()

    @contextlib.asynccontextmanager
    async def _turn_in_time(self) -> AsyncIterator[None]:
        """Take a turn; if the store is silent, each one before takes its whole timeout."""
        patience = _TURNS * self.timeout
        try:
            async with asyncio.timeout(patience):
                await self._turn.acquire()
        except TimeoutError as error:
            raise StoreFailed(f"earlier changes took {patience:g} s") from error
        try:
            yield
        finally:
            self._turn.release()

    async def _edit(self, edit: Edit) -> None:
        document = await self._in_time(self.store.read())
        assert document is not None, "no revision is empty"
        catalog, edited, text = await _parse(document, _edited, document.text, edit)
        revision = document.revision
        if edited != catalog:
            revision = await self._write(text, revision)
        await self._apply(edited, revision)
        self._has_been_read()

    async def _write(self, text: bytes, revision: str) -> str:
        try:
            return await self._in_time(self.store.write(text, revision))
        except StoreFailed:  # perhaps only its answer was lost
            with contextlib.suppress(StoreFailed):
                document = await self._in_time(self.store.read())
                if document is not None and document.text == text:
                    return document.revision
            raise

    async def _in_time(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            async with asyncio.timeout(self.timeout):
                return await work
        except TimeoutError as error:
            raise StoreFailed(f"no answer within {self.timeout:g} s") from error

    async def _apply(self, catalog: Catalog, revision: str) -> None:
        if revision != self._revision:
            logger.info(
                "The catalog %s has revision %s: %d models.",
                self.store.place,
                one_line(revision),
                len(catalog),
            )
        await self._long_work.run(self.convergence.want(catalog, self._background))
        self._revision = revision  # last: a failure above is repeated
        self._wake.set()

    def _has_been_read(self) -> None:
        if self._trouble:
            logger.info("The catalog %s can be read again.", self.store.place)
        self._trouble = ""
        self._read_at = dt.datetime.now(dt.UTC)
        self.metrics.last_read = self._read_at.timestamp()


async def _parse(document: Document, work: Callable[..., T], *arguments: object) -> T:
    """Call a function of a document, in a thread if the document is long."""
    if len(document.text) <= _SHORT_BYTES:
        return work(*arguments)
    return await in_abandonable_thread(work, *arguments)


def _edited(text: bytes, edit: Edit) -> tuple[Catalog, Catalog, bytes]:
    """Return a catalog, the edited one as it will be read, and its text; raises WrongCatalog."""
    catalog = read_catalog(text)
    text = catalog_text(edit(catalog))
    edited = read_catalog(text)
    for name, model in edited.items():
        if model.wrong and model != catalog.get(name):
            raise WrongCatalog(model.wrong)
    return catalog, edited, text


def _note(error: Exception) -> None:
    if not isinstance(error, ServeError):
        logger.error("Applying the catalog failed: %s", one_line(error), exc_info=error)


def make_synchroniser(
    config: Config, manager: ModelManager, registry: ModelRegistry, metrics: Metrics
) -> Synchroniser | None:
    """Return the synchroniser for ``model_catalog``; None if it is not set."""
    place = config.model_catalog
    if place is None:
        return None
    mode, timeout = config.model_catalog_mode, config.model_catalog_timeout
    counted = CatalogMetrics(metrics)
    convergence = Convergence(manager, registry, lambda: counted.failures.update(1))
    counted.watch_pending(lambda: len(convergence.unconverged()))
    store: CatalogStore
    if "://" in place:
        store = HttpStore(place, timeout, may_write=mode == READ_WRITE)
    else:
        store = FileStore(Path(place), timeout)
    interval = config.model_catalog_interval
    return Synchroniser(store, convergence, counted, mode, interval, timeout)
