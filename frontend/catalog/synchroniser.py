"""Read a catalog periodically and apply it.

While a catalog is missing, unreachable or invalid, the last one that could be read stays in force.
"""

import asyncio
import contextlib
import datetime as dt
import logging
import math
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from marserve.frontend.aio.background import BackgroundTasks, in_abandonable_thread
from marserve.frontend.aio.long_work import LongWork
from marserve.frontend.catalog.convergence import Convergence
from marserve.frontend.catalog.document import Catalog, WrongCatalog, read_catalog
from marserve.frontend.catalog.file_store import FileStore
from marserve.frontend.catalog.http_store import HttpStore
from marserve.frontend.catalog.store import CatalogStore, Document, StoreFailed
from marserve.frontend.configuration.config import Config
from marserve.frontend.errors import ServeError
from marserve.frontend.logs.formats import one_line
from marserve.frontend.registration.manager import ModelManager
from marserve.frontend.serving.registry import ModelRegistry
from marserve.frontend.telemetry.metrics import CatalogMetrics, Metrics

logger = logging.getLogger(__name__)

# Spreads the reads of replicas that were started together.
_JITTER = 0.2
# Models that converge at the same time: fewer processes unpack archives, and more than a hundred
# that wait for one would be refused.
_MAX_CONVERGING = 32
_MAX_LISTED = 100  # models in each list of a description
# Longer documents are parsed in a thread: a model that cannot be read takes up to 0.3 ms.
_SHORT_BYTES = 4096


@dataclass(eq=False)
class Synchroniser:
    """Reads and applies a catalog."""

    store: CatalogStore
    convergence: Convergence
    metrics: CatalogMetrics
    interval: float  # seconds between two reads
    timeout: float  # seconds of every call of the store

    def __post_init__(self) -> None:
        self._revision = ""
        self._read_at: dt.datetime | None = None  # last time that it was known to be up to date
        self._trouble = ""  # why it cannot be read now
        self._wake = asyncio.Event()
        self._background = BackgroundTasks()
        self._long_work = LongWork()
        self._converging = 0  # models, of at most `_MAX_CONVERGING`

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Apply and refresh the catalog within the block."""
        logger.info(
            "The models are those of the catalog %s. Requests cannot change them.", self.store.place
        )
        async with self._background:
            await self._refresh()
            self._background.keep_running("The catalog", self._run)
            yield

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
            "revision": self._revision or None,
            "lastRead": self._read_at and self._read_at.isoformat(timespec="milliseconds"),
            "failure": self._trouble or None,
            "models": len(self.convergence.wanted or ()),
            "unconverged": len(unconverged),
            "pending": [*islice(pending, _MAX_LISTED)],
            "underWay": sorted(unconverged - failures.keys() - wrong.keys())[:_MAX_LISTED],
            "converged": self.convergence.wanted is not None and not unconverged,
        }

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
            await self.convergence.converge(name)
        finally:
            self._converging -= 1
            self._wake.set()

    def _pause(self) -> float:
        return self.interval * random.uniform(1 - _JITTER, 1 + _JITTER)  # noqa: S311 - no secret

    async def _refresh(self) -> None:
        """Read the catalog, and apply it if it has changed."""
        try:
            document = await self._read()
            if document is not None:
                catalog = await _parse(document)
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

    async def _read(self) -> Document | None:
        try:
            async with asyncio.timeout(self.timeout):
                return await self.store.read(self._revision)
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


async def _parse(document: Document) -> Catalog:
    if len(document.text) <= _SHORT_BYTES:
        return read_catalog(document.text)
    return await in_abandonable_thread(read_catalog, document.text)


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
    counted = CatalogMetrics(metrics)
    convergence = Convergence(manager, registry, lambda: counted.failures.update(1))
    counted.watch_pending(lambda: len(convergence.unconverged()))
    interval, timeout = config.model_catalog_interval, config.model_catalog_timeout
    store: CatalogStore = HttpStore(place, timeout) if "://" in place else FileStore(Path(place))
    return Synchroniser(store, convergence, counted, interval, timeout)
