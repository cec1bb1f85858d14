"""How a catalog is read and written: every answer comes in time, with any store."""

import asyncio
import datetime as dt
import itertools
import json
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any

import pytest

from marserve.frontend.catalog.convergence import Convergence
from marserve.frontend.catalog.document import CatalogEntry, catalog_text, read_catalog
from marserve.frontend.catalog.edits import added, without
from marserve.frontend.catalog.store import Document, StoreConflict, StoreFailed
from marserve.frontend.catalog.synchroniser import Synchroniser
from marserve.frontend.errors import (
    CatalogReadOnly,
    CatalogUnavailable,
    Conflict,
    ServerStopping,
    VersionConflict,
)
from marserve.frontend.serving.registry import ModelRegistry
from marserve.frontend.telemetry.metrics import CatalogMetrics, Metrics

Call = Callable[..., Any]
EMPTY = catalog_text({})
ENTRY = CatalogEntry("m.mar", workers=(0, 0))


class Place:
    """Where a catalog lies; ``text`` None is nothing, and an ``obstacle`` comes before each use."""

    place = "here"

    def __init__(self, text: bytes | None = EMPTY) -> None:
        self.text = text
        self.looks: list[float] = []
        self.read_only = ""
        self.loses_answers = False
        self.obstacle: Callable[[], Coroutine[Any, Any, None]] | None = None

    async def why_read_only(self) -> str:
        await self._meet_obstacle()
        return self.read_only

    async def read(self, known: str = "") -> Document | None:
        self.looks.append(asyncio.get_running_loop().time())
        await self._meet_obstacle()
        if self.text is None:
            raise StoreFailed("nothing there")
        return None if known == self.revision else Document(self.text, self.revision)

    async def write(self, text: bytes, revision: str) -> str:
        await self._meet_obstacle()
        if revision != self.revision:
            raise StoreConflict
        self.text = text
        if self.loses_answers:
            raise StoreFailed("the connection was lost")
        return self.revision

    @property
    def revision(self) -> str:
        return str(self.text)

    async def _meet_obstacle(self) -> None:
        if self.obstacle is not None:
            await self.obstacle()


class Manager:
    """Registers nothing."""

    def await_catalog(self, names: Iterable[str] | None) -> None:
        """No server is waited for."""

    def report_catalog(self, *_report: Any, **_named: Any) -> None:
        """Not read here."""

    async def register(self, _registration: object) -> None:
        await asyncio.sleep(10_000)


async def silence() -> None:
    await asyncio.sleep(1_000_000)


def watch(place: Place, mode: str | None = None) -> tuple[Synchroniser, Convergence]:
    manager: Any = Manager()
    metrics = CatalogMetrics(Metrics("host"))
    convergence = Convergence(manager, ModelRegistry(), lambda: metrics.failures.update(1))
    timing = {"interval": 5.0, "timeout": 10.0}
    return Synchroniser(place, convergence, metrics, mode=mode, **timing), convergence


def test_it_is_looked_at_again_and_again_and_not_by_all_at_once(run: Call) -> None:
    async def scenario() -> None:
        place = Place()
        synchroniser, convergence = watch(place)
        async with synchroniser.running():
            assert convergence.wanted == {}
            place.text = catalog_text({})[:-3]  # cut short
            await asyncio.sleep(30)
            assert "not valid JSON" in synchroniser.describe()["failure"]
            place.text = None
            await asyncio.sleep(30)
            assert synchroniser.describe()["failure"] == "nothing there"
            assert convergence.wanted == {}
            place.text = catalog_text(added("m", "1", ENTRY)({}))
            await asyncio.sleep(30)
            assert [*convergence.wanted] == ["m"]
            assert synchroniser.describe()["failure"] is None
        pauses = [later - earlier for earlier, later in itertools.pairwise(place.looks)]
        assert all(4 <= pause <= 6 for pause in pauses)
        assert len({round(pause, 3) for pause in pauses}) > 5

    run(scenario())


def test_a_place_that_is_silent_holds_up_neither_the_start_nor_a_client(run: Call) -> None:
    async def scenario() -> None:
        place, loop = Place(), asyncio.get_running_loop()
        place.obstacle = silence
        synchroniser, convergence = watch(place)
        began = loop.time()
        async with synchroniser.running():
            assert loop.time() - began <= 20
            assert convergence.wanted is None
            began = loop.time()
            with pytest.raises(CatalogUnavailable, match="no answer within 10 s"):
                await synchroniser.change(added("m", "1", ENTRY))
            assert loop.time() - began <= 20  # a look may have been first
            place.obstacle = None
            await synchroniser.change(added("m", "1", ENTRY))
            assert [*(convergence.wanted or ())] == ["m"]

    run(scenario())


def test_many_clients_of_a_silent_place_wait_no_longer_than_a_few(run: Call) -> None:
    async def scenario() -> None:
        place, loop = Place(), asyncio.get_running_loop()
        synchroniser, _ = watch(place)
        async with synchroniser.running():
            place.obstacle = silence
            began = loop.time()
            changes = [synchroniser.change(added(f"m{n}", "1", ENTRY)) for n in range(50)]
            outcomes = await asyncio.gather(*changes, return_exceptions=True)
            assert all(isinstance(each, CatalogUnavailable) for each in outcomes)
            assert loop.time() - began <= 50
            place.obstacle = None
            await synchroniser.change(added("m", "1", ENTRY))

    run(scenario())


def test_a_change_is_made_again_on_what_others_have_written(run: Call) -> None:
    async def scenario() -> None:
        place = Place()
        synchroniser, convergence = watch(place)
        async with synchroniser.running():
            others = iter("abc")

            async def another() -> None:
                name = next(others, "")
                if name:
                    assert place.text is not None
                    place.text = catalog_text(added(name, "1", ENTRY)(read_catalog(place.text)))

            place.obstacle = another
            await synchroniser.change(added("m", "1", ENTRY))
            assert place.text is not None
            assert sorted(read_catalog(place.text)) == ["a", "b", "c", "m"]
            assert convergence.wanted == read_catalog(place.text)
            place.obstacle = None
            with pytest.raises(VersionConflict):
                await synchroniser.change(added("a", "1", ENTRY))

    run(scenario())


def test_a_write_that_was_made_counts_even_if_its_answer_is_lost(run: Call) -> None:
    async def scenario() -> None:
        place = Place()
        place.loses_answers = True
        synchroniser, convergence = watch(place)
        async with synchroniser.running():
            await synchroniser.change(added("m", "1", ENTRY))
            assert [*(convergence.wanted or ())] == ["m"]
            assert synchroniser.describe()["revision"] == place.revision

    run(scenario())


def test_a_catalog_whose_application_failed_is_applied_at_the_next_look(
    run: Call, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        place = Place()
        synchroniser, convergence = watch(place)

        def fail(*_: object) -> Iterator[None]:
            monkeypatch.undo()
            yield
            raise RecursionError("too deep")

        async with synchroniser.running():
            monkeypatch.setattr(convergence, "want", fail)
            place.text = catalog_text(added("m", "1", ENTRY)({}))
            await asyncio.sleep(30)
            assert [*(convergence.wanted or ())] == ["m"]
            assert synchroniser.describe()["revision"] == place.revision

    run(scenario())
    assert "too deep" in caplog.text


def test_who_is_overtaken_every_time_is_told(run: Call) -> None:
    async def scenario() -> None:
        place = Place()
        synchroniser, _ = watch(place)
        async with synchroniser.running():

            async def another() -> None:
                assert place.text is not None
                place.text += b" "

            place.obstacle = another
            with pytest.raises(Conflict):
                await synchroniser.change(added("m", "1", ENTRY))
            assert place.text is not None
            assert read_catalog(place.text) == {}

    run(scenario())


def test_a_model_that_cannot_be_read_is_written_as_it_is(run: Call) -> None:
    async def scenario() -> None:
        place = Place(b'{"models": {"odd": {"1": {"url": "m.mar", "newWord": 3}}}}')
        synchroniser, _ = watch(place)
        async with synchroniser.running():
            (pending,) = synchroniser.describe()["pending"]
            assert pending == {"modelName": "odd", "reason": "odd 1: 'newWord' is unknown."}
            await synchroniser.change(added("m", "1", ENTRY))
            assert place.text is not None
            written = json.loads(place.text)["models"]
            assert written["odd"] == {"1": {"url": "m.mar", "newWord": 3}}
            assert written["m"]["1"]["url"] == "m.mar"
            with pytest.raises(CatalogUnavailable, match="'newWord' is unknown"):
                await synchroniser.change(without("odd", None))

    run(scenario())


@pytest.mark.parametrize("text", [None, b"", b'{"models": {"m": 1}}'])
def test_nothing_is_written_over_a_catalog_that_is_broken_or_gone(
    run: Call, text: bytes | None
) -> None:
    async def scenario() -> None:
        place = Place()
        synchroniser, convergence = watch(place)
        async with synchroniser.running():
            place.text = text
            with pytest.raises(CatalogUnavailable, match="cannot be changed now"):
                await synchroniser.change(added("m", "1", ENTRY))
            assert place.text == text
            assert convergence.wanted == {}

    run(scenario())


@pytest.mark.parametrize(("mode", "obstacle"), [("read-only", ""), (None, "a ConfigMap")])
def test_what_is_only_read_says_why(run: Call, mode: str | None, obstacle: str) -> None:
    async def scenario() -> None:
        place = Place()
        place.read_only = obstacle
        synchroniser, _ = watch(place, mode)
        async with synchroniser.running():
            with pytest.raises(CatalogReadOnly, match=obstacle or "model_catalog_mode=read-only"):
                await synchroniser.change(added("m", "1", ENTRY))
            assert synchroniser.describe()["mode"] == "read-only"

    run(scenario())


def test_a_start_that_shall_write_and_cannot_is_refused(run: Call) -> None:
    async def scenario() -> None:
        place = Place()
        place.read_only = "a ConfigMap"
        synchroniser, _ = watch(place, "read-write")
        with pytest.raises(OSError, match="model_catalog_mode=read-write, and here: a ConfigMap"):
            async with synchroniser.running():
                pass

    run(scenario())


def test_when_the_server_stops_nothing_is_begun_any_more(run: Call) -> None:
    async def scenario() -> None:
        synchroniser, _ = watch(Place())
        async with synchroniser.running():
            pass
        with pytest.raises(ServerStopping):
            synchroniser.start(synchroniser.converge("m"))

    run(scenario())


def test_what_is_told_of_it(run: Call) -> None:
    async def scenario() -> None:
        place = Place(catalog_text(added("m", "1", ENTRY)({})))
        synchroniser, _ = watch(place)
        before = dt.datetime.now(dt.UTC)
        assert synchroniser.describe()["revision"] is None
        async with synchroniser.running():
            described = synchroniser.describe()
            read = dt.datetime.fromisoformat(described.pop("lastRead"))
            assert abs(read - before) < dt.timedelta(minutes=1)
            assert described == {
                "catalog": "here",
                "mode": "read-write",
                "revision": place.revision,
                "failure": None,
                "models": 1,
                "unconverged": 1,
                "pending": [],
                "underWay": ["m"],
                "converged": False,
            }

    run(scenario())
