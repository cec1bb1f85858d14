"""How a server follows a catalog: what fails is tried again, and what serves is kept meanwhile."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from cpu_time import least_cpu_seconds
from hypothesis import given, settings
from hypothesis import strategies as st

from marserve.frontend.aio.background import BackgroundTasks
from marserve.frontend.aio.long_work import LongWork
from marserve.frontend.catalog.convergence import Convergence
from marserve.frontend.catalog.document import Catalog, CatalogModel
from marserve.frontend.configuration.model_entry import ModelEntry
from marserve.frontend.errors import ArchiveRefused, Conflict, WorkersFailed
from marserve.frontend.registration.manager import ModelManager
from marserve.frontend.registration.model_changes import Registration
from marserve.frontend.serving.registry import ModelRegistry

Call = Callable[..., Any]


@dataclass(eq=False)
class Workers:
    min_workers: int = 1
    count: int = 1

    def __len__(self) -> int:
        return self.count


@dataclass(eq=False)
class Model:
    """Of a model version what a catalog has to do with."""

    name: str
    version: str
    url: str
    workers: Workers = field(default_factory=Workers)


class Manager:
    """Registers models without archives and workers; ``broken`` URLs and changes fail."""

    await_catalog: Any = ModelManager.await_catalog
    report_catalog: Any = ModelManager.report_catalog

    def __init__(self, registry: ModelRegistry) -> None:
        self.registry: Any = registry
        self._registry: Any = registry  # for the methods above
        self.broken: set[str] = set()
        self.seconds = 0.0  # that a registration takes
        self.calls: list[str] = []

    async def register(self, registration: Registration) -> Model:
        model = Model(registration.name, registration.version, registration.url)
        self._note("register", model)
        self._fail_if_broken(model.url)
        self.registry.add(model)
        await asyncio.sleep(self.seconds)
        if model not in self.registry:
            raise Conflict("unregistered")
        return model

    async def replace(self, old: Model, registration: Registration) -> Model:
        model = Model(old.name, old.version, registration.url)
        self._note("replace", model)
        self._fail_if_broken(model.url)
        self.registry.replace(old, model)
        return model

    async def reconfigure_from_catalog(self, name: str, version: str, entry: Any) -> Model:
        self._fail_if_broken("reconfigure")
        return self.registry.find(name, version)

    async def scale(
        self, name: str, version: str, low: int, high: int, *, synchronous: bool
    ) -> Model:
        model = self.registry.find(name, version)
        self.calls.append(f"scale {low} {high}")
        model.workers.min_workers = low
        return model

    async def set_current_workers(self, model: Model, count: int) -> None:
        self.calls.append(f"have {count}")
        if "workers" in self.broken:
            raise WorkersFailed("no memory")

    async def set_default(self, name: str, version: str) -> None:
        self.registry.set_default(name, version)

    async def unregister(self, name: str, version: str) -> None:
        self.registry.remove(self.registry.find(name, version))

    def _note(self, what: str, model: Model) -> None:
        self.calls.append(f"{what} {model.version} {model.url}")

    def _fail_if_broken(self, url: str) -> None:
        if url in self.broken:
            raise ArchiveRefused(f"{url} is broken")


class World:
    """A server that follows a catalog."""

    def __init__(self) -> None:
        self.registry = ModelRegistry()
        self.manager: Any = Manager(self.registry)
        self.failures = 0
        self.convergence = Convergence(self.manager, self.registry, self._failed)

    async def want(self, catalog: Catalog) -> None:
        """Another catalog, followed as far as that goes."""
        async with BackgroundTasks() as background:
            await LongWork().run(self.convergence.want(catalog, background))
            for name in self.convergence.due(asyncio.get_running_loop().time()):
                await self.convergence.converge(name)

    @property
    def served(self) -> Catalog:
        found: dict[str, CatalogModel] = {}
        for model in self.registry:
            known = self.convergence.registered(model.name)
            assert known is not None
            assert known.versions[model.version].url == model.url
            found[model.name] = known
        return found

    def _failed(self) -> None:
        self.failures += 1


def one(version: str, url: str, **members: Any) -> Catalog:
    return {"m": CatalogModel(version, {version: ModelEntry(url, **members)})}


ENTRIES = st.builds(
    ModelEntry,
    url=st.sampled_from(["a", "b", "c"]),
    workers=st.sampled_from([None, (1, 1), (2, 2)]),
    settings=st.sampled_from([{}, {"size": 2}, {"size": 4}]),
)


@st.composite
def catalogs(draw: st.DrawFn) -> Catalog:
    found = {}
    for name in draw(st.sets(st.sampled_from("mn"))):
        versions = draw(st.dictionaries(st.sampled_from("12"), ENTRIES, min_size=1))
        found[name] = CatalogModel(draw(st.sampled_from(sorted(versions))), versions)
    return found


BROKEN = st.sets(st.sampled_from(["a", "b", "c", "reconfigure", "workers"]))


@settings(max_examples=60)
@given(path=st.lists(st.tuples(catalogs(), BROKEN), min_size=1, max_size=4))
def test_whatever_fails_what_is_wanted_is_served_and_in_the_end_all_of_it(path):
    async def scenario():
        world = World()
        for catalog, broken in path:
            world.manager.broken = broken
            before = world.served
            await world.want(catalog)
            served = world.served
            assert served.keys() <= catalog.keys()
            # A model that was served and is still wanted has a version that serves.
            assert catalog.keys() & before.keys() <= served.keys()
            for name, model in served.items():
                wanted = catalog[name]
                if model.default not in wanted.versions:  # the old one, as the new one fails
                    assert wanted.default in world.convergence.failures[name]
            is_whole = served == catalog
            assert is_whole is not bool(world.convergence.failures)
            assert is_whole is not bool(world.registry.catalog_progress.trouble)
        world.manager.broken = set()
        for name in {*catalog, *world.served}:
            await world.convergence.converge(name)
            assert world.convergence.failures.of(name) == []
        assert world.served == catalog
        assert world.convergence.unconverged() == set()

    asyncio.run(scenario())


def test_what_fails_is_tried_again_less_and_less_often(run):
    async def scenario():
        world, loop = World(), asyncio.get_running_loop()
        world.manager.broken = {"a"}
        await world.want(one("1", "a"))
        pauses = []
        for _ in range(11):
            assert world.convergence.due(loop.time()) == []
            pauses.append(world.convergence.next_due() - loop.time())
            await asyncio.sleep(pauses[-1])
            assert world.convergence.due(loop.time()) == ["m"]
            await world.convergence.converge("m")
        assert pauses == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]
        assert world.failures == 12
        # Another entry is tried at once.
        world.manager.broken = set()
        await world.want(one("1", "b"))
        assert world.served == one("1", "b")
        assert world.convergence.failures == {}

    run(scenario())


def test_until_the_first_catalog_is_served_the_server_is_not_ready(run):
    async def scenario():
        world = World()
        registry = world.registry
        assert not registry.catalog_progress.is_known
        world.manager.broken = {"a"}
        await world.want({**one("1", "a"), "n": CatalogModel("1", {"1": ModelEntry("n")})})
        assert registry.catalog_progress.is_known
        assert registry.catalog_progress.awaited == {"m"}
        assert [(load.name, load.reason) for load in registry.failed] == [("m", "a is broken")]
        assert not any(load.is_awaited for load in registry.failed)
        await world.want(one("1", "b"))
        assert registry.catalog_progress.awaited == set()
        assert list(registry.failed) == []
        # Once it was ready, no catalog takes it from its clients.
        await world.want({**one("1", "b"), "o": CatalogModel("1", {"1": ModelEntry("a")})})
        assert registry.catalog_progress.awaited == set()
        assert registry.catalog_progress.trouble == "not as the catalog wants them: o"

    run(scenario())


def test_the_minimum_of_workers_rises_when_they_are_there(run):
    async def scenario():
        world = World()
        await world.want(one("1", "a", workers=(1, 1)))
        await world.want(one("1", "a", workers=(3, 4)))
        assert world.manager.calls == ["register 1 a", "scale 1 4", "have 3", "scale 3 4"]
        await world.want(one("1", "a", workers=(3, 6)))
        world.registry.find("m").workers.count = 5  # as the load asks for
        world.manager.calls.clear()
        await world.want(one("1", "a", workers=(4, 6)))
        assert world.manager.calls == ["scale 3 6", "have 5", "scale 4 6"]
        await world.want(one("1", "a", workers=(3, 4)))
        world.manager.broken = {"workers"}
        await world.want(one("1", "a", workers=(9, 9)))
        assert world.registry.find("m").workers.min_workers == 3

    run(scenario())


def test_a_registration_that_is_not_wanted_any_more_is_given_up(run):
    async def scenario():
        world = World()
        world.manager.seconds = 60.0
        async with BackgroundTasks() as background:
            await LongWork().run(world.convergence.want(one("1", "a"), background))
            loading = background.start(world.convergence.converge("m"))
            await asyncio.sleep(1)
            now = asyncio.get_running_loop().time()
            assert world.convergence.due(now) == []  # it is under way
            await LongWork().run(world.convergence.want(one("2", "b"), background))
            await loading
            assert world.convergence.failures.of("m") == []
        assert world.served == one("2", "b")
        assert world.failures == 0

    run(scenario())


def test_what_changes_while_a_model_loads_is_no_reason_to_load_it_again(run):
    async def scenario():
        world = World()
        world.manager.seconds = 60.0
        async with BackgroundTasks() as background:
            await LongWork().run(world.convergence.want(one("1", "a", workers=(1, 1)), background))
            loading = background.start(world.convergence.converge("m"))
            await asyncio.sleep(1)
            wanted = one("1", "a", workers=(2, 2), settings={"size": 4})
            await LongWork().run(world.convergence.want(wanted, background))
            await loading
            assert world.convergence.failures.of("m") == []
        assert world.served == wanted
        assert world.manager.calls == ["register 1 a", "scale 1 2", "have 2", "scale 2 2"]

    run(scenario())


def test_what_is_not_of_the_catalog_is_left_alone(run):
    async def scenario():
        world = World()
        node = Model("m", "1", "m.mar")
        world.registry.add(node)
        await world.want({})
        assert list(world.registry) == [node]
        await world.want(one("1", "a"))
        (failure,) = world.convergence.failures.of("m")
        assert failure.reason == "A workflow has a node of this name here."
        assert world.manager.calls == []

    run(scenario())


def test_a_retry_that_is_under_way_is_no_reason_to_wake(run):
    async def scenario():
        world, loop = World(), asyncio.get_running_loop()
        world.manager.broken = {"a"}
        await world.want(one("1", "a"))
        await asyncio.sleep(5)
        world.manager.broken, world.manager.seconds = set(), 60.0
        retry = asyncio.create_task(world.convergence.converge("m"))
        await asyncio.sleep(1)
        assert world.convergence.due(loop.time()) == []
        assert world.convergence.next_due() > loop.time()
        await retry
        assert world.convergence.unconverged() == set()

    run(scenario())


def test_a_model_that_cannot_be_read_is_told_and_stays_as_it_is(run):
    async def scenario():
        world = World()
        served = {**one("1", "a"), "n": CatalogModel("1", {"1": ModelEntry("n")})}
        await world.want(served)
        wrong = CatalogModel("", {}, wrong="m 1: why")
        await world.want({"m": wrong, "new": wrong})
        assert world.served == one("1", "a")
        assert world.convergence.unconverged() == {"m", "new"}
        assert [(each.name, each.reason) for each in world.registry.failed] == [("new", "m 1: why")]
        assert world.registry.catalog_progress.trouble == "not as the catalog wants them: m, new"
        assert world.failures == 2
        await world.want({})
        assert world.served == {}
        # It was never served here: the server is not ready until it can be read.
        world = World()
        await world.want({"m": wrong})
        assert world.registry.catalog_progress.awaited == {"m"}
        await world.want(one("1", "a"))
        assert (world.served, world.convergence.unconverged()) == (one("1", "a"), set())
        assert not world.registry.catalog_progress.awaited

    run(scenario())


@pytest.mark.parametrize("kind", ["cannot be read", "cannot be loaded"])
def test_the_work_for_models_that_fail_is_linear(kind, caplog):
    if kind == "cannot be read":
        model = CatalogModel("", {}, wrong="of an unknown word")
    else:
        model = CatalogModel("1", {"1": ModelEntry("a")})

    async def scenario(count):
        world = World()
        world.manager.broken = {"a"}
        await world.want({f"m{number}": model for number in range(count)})
        return world

    def follow(count):
        """Follow a catalog of ``count`` models, all of which fail."""
        caplog.clear()
        world = asyncio.run(scenario(count))
        assert world.failures == len(world.convergence.unconverged()) == count
        assert len(list(world.registry.failed)) == count
        assert len(list(world.registry.failed.listed())) <= 1000
        assert len(world.registry.catalog_progress.trouble) < 200

    few = max(least_cpu_seconds(lambda: follow(300), 0.0), 0.01)
    limit = 5 * 20 * few  # 400 times as much were it quadratic
    assert least_cpu_seconds(lambda: follow(6000), limit) < limit
    if kind == "cannot be read":
        (line,) = [record.getMessage() for record in caplog.records]
        assert line.startswith("The catalog: 6000 models cannot be read")
        assert len(line) < 500


def test_a_setting_that_cannot_be_changed_is_told_and_the_model_serves_on(run):
    async def scenario():
        world = World()
        await world.want(one("1", "a", settings={"size": 2}))
        world.manager.broken = {"reconfigure"}
        await world.want(one("1", "a", settings={"size": 4}))
        assert world.served == one("1", "a", settings={"size": 2})
        assert world.convergence.unconverged() == {"m"}

    run(scenario())


@pytest.mark.parametrize("url", ["a", "b"])
def test_a_version_with_another_archive_is_replaced(run, url):
    async def scenario():
        world = World()
        await world.want(one("1", "old"))
        entry = replace(ModelEntry("old"), url=url)
        await world.want({"m": CatalogModel("1", {"1": entry})})
        assert world.manager.calls == ["register 1 old", f"replace 1 {url}"]
        assert world.served == one("1", url)

    run(scenario())
