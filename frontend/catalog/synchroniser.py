"""Keeps a server to a catalog: looks at it again and again, and writes what clients change.

Nothing is unregistered for a catalog that is missing, cannot be reached or is broken: the last one
that could be read stays in force. Nothing is written over such a one, either, and no catalog is
made where there is none: it might be the one that others still serve.
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
from typing import Any, TypeVar

from marserve.frontend.aio.background import BackgroundTasks, in_abandonable_thread
from marserve.frontend.aio.long_work import LongWork
from marserve.frontend.catalog.convergence import Convergence
from marserve.frontend.catalog.document import (
    Catalog,
    CatalogEntry,
    CatalogModel,
    WrongCatalog,
    catalog_text,
    read_catalog,
)
from marserve.frontend.catalog.edits import Edit
from marserve.frontend.catalog.failures import Failure
from marserve.frontend.catalog.store import (
    CatalogStore,
    Document,
    StoreConflict,
    StoreFailed,
)
from marserve.frontend.errors import (
    CatalogConflict,
    CatalogReadOnly,
    CatalogUnavailable,
    ServeError,
)
from marserve.frontend.logs.formats import one_line
from marserve.frontend.serving.model_version import ModelVersion
from marserve.frontend.telemetry.catalog_metrics import CatalogMetrics

T = TypeVar("T")

logger = logging.getLogger(__name__)

READ_ONLY, READ_WRITE = MODES = ("read-only", "read-write")
# Replicas that were started together shall not ask all at once.
_JITTER = 0.2
_TRIES = 20
# How often a client waits for the store's timeout while others have their turn.
_TURNS = 3
# Models that are brought to what is wanted at a time: archives are unpacked by fewer processes, and
# more than a hundred that wait for one would be refused.
_MAX_CONVERGING = 32
_MAX_LISTED = 100  # models in each list of a description
# Longer documents are read in a thread: a model that cannot be read takes up to 0.3 ms.
_SHORT_BYTES = 4096
_CONFLICT_PAUSE_SECONDS = 0.05


@dataclass(frozen=True)
class CatalogOptions:
    """How a catalog is watched; times in seconds."""

    mode: str | None  # of `MODES`; None: as the store allows
    interval: float
    timeout: float  # of every wait for the store


class Synchroniser:
    """Watches a catalog and has it applied."""

    def __init__(
        self,
        store: CatalogStore,
        convergence: Convergence,
        options: CatalogOptions,
        metrics: CatalogMetrics,
    ) -> None:
        self._store = store
        self._convergence = convergence
        self._options = options
        self._metrics = metrics
        self._revision = ""
        self._read_at: dt.datetime | None = None  # when it was last known to be up to date
        self._trouble = ""  # why it cannot be read now
        self._why_read_only = ""
        self._wake = asyncio.Event()
        # Looks and changes follow each other, so that what is wanted never goes back.
        self._turn = asyncio.Lock()
        self._background = BackgroundTasks()
        self._long_work = LongWork()
        self._converging = 0  # models, of at most `_MAX_CONVERGING`

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep to the catalog within the block; it is looked at once before.

        Raises:
            OSError: It shall be written, and cannot be.
        """
        async with self._background:
            await self._decide_mode()
            await self._look()
            self._background.keep_running("The catalog", self._run)
            yield

    async def change(self, edit: Edit) -> None:
        """Write a change of the catalog, and want what is written.

        Raises:
            CatalogReadOnly: It is not for this server to write.
            CatalogUnavailable: It cannot be read or written now.
            CatalogConflict: Others were faster at every try.
            ServeError: The edit cannot be made.
        """
        self.check_writable()
        for attempt in range(_TRIES):
            if attempt:
                await asyncio.sleep(random.uniform(0, 2 * _CONFLICT_PAUSE_SECONDS * attempt))  # noqa: S311 - no secret
            try:
                async with self._turn_in_time():
                    await self._edit(edit)
                    return
            except StoreConflict:
                continue
            except (StoreFailed, WrongCatalog) as error:
                self._metrics.write_failures.update(1)
                what = f"The catalog {self._store.place} cannot be changed now: {error}"
                raise CatalogUnavailable(what) from error
        raise CatalogConflict(
            f"The catalog {self._store.place} was changed by others at each of {_TRIES} tries to "
            "change it. Try again later."
        )

    async def converge(self, name: str) -> list[Failure]:
        """Bring a model to what is wanted; returns what of it failed."""
        failures = await self._convergence.converge(name)
        self._wake.set()  # for the next retry
        return failures

    async def adopt(self, model: ModelVersion, entry: CatalogEntry) -> None:
        """Leave a registered version to the catalog, and bring its model to what is wanted."""
        self._convergence.adopt(model, entry)
        await self.converge(model.name)

    def start(self, work: Coroutine[Any, Any, T]) -> "asyncio.Future[T]":
        """Run something to its end, even if nobody waits for it any more.

        Raises:
            ServerStopping: It is too late for that.
        """
        return self._background.start(work, _note)

    def wanted(self, name: str) -> CatalogModel | None:
        """What the catalog, as far as it is known, has of a model."""
        return (self._convergence.wanted or {}).get(name)

    def check_writable(self) -> None:
        """Raise CatalogReadOnly unless this server changes the catalog."""
        if self._why_read_only:
            raise CatalogReadOnly(self._store.place, self._why_read_only)

    def describe(self) -> dict[str, Any]:
        """What is known of the catalog and of how far it is applied, for operators."""
        now = asyncio.get_running_loop().time()
        failures, wrong = self._convergence.failures, self._convergence.wrong
        unconverged = self._convergence.unconverged()
        pending = chain(
            ({"modelName": name, "reason": reason} for name, reason in wrong.items()),
            (each.described(now) for name in failures for each in failures.of(name)),
        )
        return {
            "catalog": self._store.place,
            "mode": READ_ONLY if self._why_read_only else READ_WRITE,
            "revision": self._revision or None,
            "lastRead": self._read_at and self._read_at.isoformat(timespec="milliseconds"),
            "failure": self._trouble or None,
            "models": len(self._convergence.wanted or ()),
            "unconverged": len(unconverged),
            "pending": [*islice(pending, _MAX_LISTED)],
            "underWay": sorted(unconverged - failures.keys() - wrong.keys())[:_MAX_LISTED],
            "converged": self._convergence.wanted is not None and not unconverged,
        }

    async def _decide_mode(self) -> None:
        why = ""
        with contextlib.suppress(StoreFailed):  # then the first change will fail
            why = await self._in_time(self._store.why_read_only())
        if self._options.mode == READ_WRITE and why:
            raise OSError(f"model_catalog_mode=read-write, and {self._store.place}: {why}.")
        changes = "what clients change of models is written there"
        if self._options.mode == READ_ONLY:
            why = f"model_catalog_mode={READ_ONLY}"
        if why:
            changes = f"it is only read ({why}), so that clients cannot change models here"
        self._why_read_only = why
        logger.info("The models are those of the catalog %s; %s.", self._store.place, changes)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        next_look = loop.time() + self._pause()
        while True:
            now = loop.time()
            for name in self._convergence.due(now, _MAX_CONVERGING - self._converging):
                self._converging += 1
                self._background.start(self._converge_counted(name), _note)
            is_full = self._converging == _MAX_CONVERGING  # then one that ends wakes this loop
            next_due = math.inf if is_full else self._convergence.next_due()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(min(next_look, next_due)):
                    await self._wake.wait()
            self._wake.clear()
            if loop.time() >= next_look:
                await self._look()
                next_look = loop.time() + self._pause()

    async def _converge_counted(self, name: str) -> None:
        try:
            await self.converge(name)
        finally:
            self._converging -= 1
            self._wake.set()

    def _pause(self) -> float:
        return self._options.interval * random.uniform(1 - _JITTER, 1 + _JITTER)  # noqa: S311 - no secret

    async def _look(self) -> None:
        """Read the catalog if it is another one; what cannot be read changes nothing."""
        async with self._turn:
            try:
                document = await self._in_time(self._store.read(self._revision))
                if document is not None:
                    catalog = await _aside(document, read_catalog, document.text)
            except (StoreFailed, WrongCatalog) as error:
                self._metrics.read_failures.update(1)
                reason = one_line(error)
                if reason != self._trouble:
                    known = "the last one that could be read stays" if self._revision else "waiting"
                    logger.error("The catalog %s: %s (%s)", self._store.place, reason, known)  # noqa: TRY400 - said in full
                self._trouble = reason
            else:
                if document is not None:
                    await self._take(catalog, document.revision)
                self._has_been_read()

    @contextlib.asynccontextmanager
    async def _turn_in_time(self) -> AsyncIterator[None]:
        """A turn; where the store is silent, each of those before takes all the time it has."""
        patience = _TURNS * self._options.timeout
        try:
            async with asyncio.timeout(patience):
                await self._turn.acquire()
        except TimeoutError as error:
            raise StoreFailed(f"others have waited for it for {patience:g} s") from error
        try:
            yield
        finally:
            self._turn.release()

    async def _edit(self, edit: Edit) -> None:
        document = await self._in_time(self._store.read())
        assert document is not None, "no revision is empty"
        catalog, edited, text = await _aside(document, _edited, document.text, edit)
        revision = document.revision
        if edited != catalog:
            revision = await self._write(text, revision)
        await self._take(edited, revision)
        self._has_been_read()

    async def _write(self, text: bytes, revision: str) -> str:
        try:
            return await self._in_time(self._store.write(text, revision))
        except StoreFailed:  # or only the answer was lost
            with contextlib.suppress(StoreFailed):
                document = await self._in_time(self._store.read())
                if document is not None and document.text == text:
                    return document.revision
            raise

    async def _in_time(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            async with asyncio.timeout(self._options.timeout):
                return await work
        except TimeoutError as error:
            raise StoreFailed(f"no answer within {self._options.timeout:g} s") from error

    async def _take(self, catalog: Catalog, revision: str) -> None:
        if revision != self._revision:
            logger.info(
                "The catalog %s is of revision %s: %d models.",
                self._store.place,
                one_line(revision),
                len(catalog),
            )
        await self._long_work.run(self._convergence.want(catalog, self._background))
        self._revision = revision  # last: what fails before is tried again
        self._wake.set()

    def _has_been_read(self) -> None:
        if self._trouble:
            logger.info("The catalog %s can be read again.", self._store.place)
        self._trouble = ""
        self._read_at = dt.datetime.now(dt.UTC)
        self._metrics.was_read(self._read_at.timestamp())


async def _aside(document: Document, work: Callable[..., T], *arguments: object) -> T:
    """Call a function of a document, in a thread where that may take long."""
    if len(document.text) <= _SHORT_BYTES:
        return work(*arguments)
    return await in_abandonable_thread(work, *arguments)


def _edited(text: bytes, edit: Edit) -> tuple[Catalog, Catalog, bytes]:
    """Return a catalog, the edited one as all will read it, and its text; raises WrongCatalog."""
    catalog = read_catalog(text)
    text = catalog_text(edit(catalog))
    edited = read_catalog(text)
    for name, model in edited.items():
        if model.wrong and model != catalog.get(name):
            raise WrongCatalog(model.wrong)
    return catalog, edited, text


def _note(error: Exception) -> None:
    if not isinstance(error, ServeError):
        logger.error("Keeping to the catalog failed: %s", one_line(error), exc_info=error)
