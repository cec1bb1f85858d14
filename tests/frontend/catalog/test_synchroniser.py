"""How a catalog is read: it is applied in time, with any store."""

import asyncio
import datetime as dt
import itertools
from collections.abc import Callable, Iterable
from typing import Any

from marserve.frontend.catalog.convergence import Convergence
from marserve.frontend.catalog.store import Document, StoreFailed
from marserve.frontend.catalog.synchroniser import Synchroniser
from marserve.frontend.serving.registry import ModelRegistry
from marserve.frontend.telemetry.metrics import CatalogMetrics, Metrics

Call = Callable[..., Any]
EMPTY = b'{"models": {}}'
ONE = b'{"models": {"m": {"1": {"url": "m.mar", "minWorkers": 0}}}}'


class Place:
    """Where a catalog lies; ``text`` None is nothing."""

    place = "here"

    def __init__(self, text: bytes | None = EMPTY) -> None:
        self.text = text
        self.looks: list[float] = []
        self.is_silent = False

    async def read(self, known: str = "") -> Document | None:
        self.looks.append(asyncio.get_running_loop().time())
        if self.is_silent:
            await asyncio.sleep(1_000_000)
        if self.text is None:
            raise StoreFailed("nothing there")
        return None if known == self.revision else Document(self.text, self.revision)

    @property
    def revision(self) -> str:
        return str(self.text)


class Manager:
    """Registers nothing."""

    def await_catalog(self, names: Iterable[str] | None) -> None:
        """No server is waited for."""

    def report_catalog(self, *_report: Any, **_named: Any) -> None:
        """Not read here."""

    async def register(self, _registration: object) -> None:
        await asyncio.sleep(10_000)


def watch(place: Place) -> tuple[Synchroniser, Convergence]:
    manager: Any = Manager()
    metrics = CatalogMetrics(Metrics("host"))
    convergence = Convergence(manager, ModelRegistry(), lambda: metrics.failures.update(1))
    timing = {"interval": 5.0, "timeout": 10.0}
    return Synchroniser(place, convergence, metrics, **timing), convergence


def test_it_is_looked_at_again_and_again_and_not_by_all_at_once(run):
    async def scenario():
        place = Place()
        synchroniser, convergence = watch(place)
        async with synchroniser.running():
            assert convergence.wanted == {}
            place.text = EMPTY[:-3]  # cut short
            await asyncio.sleep(30)
            assert "not valid JSON" in synchroniser.describe()["failure"]
            place.text = None
            await asyncio.sleep(30)
            assert synchroniser.describe()["failure"] == "nothing there"
            assert convergence.wanted == {}
            place.text = ONE
            await asyncio.sleep(30)
            assert [*convergence.wanted] == ["m"]
            assert synchroniser.describe()["failure"] is None
        pauses = [later - earlier for earlier, later in itertools.pairwise(place.looks)]
        assert all(4 <= pause <= 6 for pause in pauses)
        assert len({round(pause, 3) for pause in pauses}) > 5

    run(scenario())


def test_a_silent_place_does_not_hold_up_the_start(run):
    async def scenario():
        place, loop = Place(), asyncio.get_running_loop()
        place.is_silent = True
        synchroniser, convergence = watch(place)
        began = loop.time()
        async with synchroniser.running():
            assert loop.time() - began <= 20
            assert convergence.wanted is None
            assert synchroniser.describe()["failure"] == "no answer within 10 s"
            place.is_silent = False
            await asyncio.sleep(30)
            assert convergence.wanted == {}

    run(scenario())


def test_a_catalog_whose_application_failed_is_applied_at_the_next_look(run, monkeypatch, caplog):
    async def scenario():
        place = Place()
        synchroniser, convergence = watch(place)

        def fail(*_):
            monkeypatch.undo()
            yield
            raise RecursionError("too deep")

        async with synchroniser.running():
            monkeypatch.setattr(convergence, "want", fail)
            place.text = ONE
            await asyncio.sleep(30)
            assert [*(convergence.wanted or ())] == ["m"]
            assert synchroniser.describe()["revision"] == place.revision

    run(scenario())
    assert "too deep" in caplog.text


def test_what_is_told_of_it(run):
    async def scenario():
        place = Place(ONE)
        synchroniser, _ = watch(place)
        before = dt.datetime.now(dt.UTC)
        assert synchroniser.describe()["revision"] is None
        async with synchroniser.running():
            described = synchroniser.describe()
            read = dt.datetime.fromisoformat(described.pop("lastRead"))
            assert abs(read - before) < dt.timedelta(minutes=1)
            assert described == {
                "catalog": "here",
                "revision": place.revision,
                "failure": None,
                "models": 1,
                "unconverged": 1,
                "pending": [],
                "underWay": ["m"],
                "converged": False,
            }

    run(scenario())
