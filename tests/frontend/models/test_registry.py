import asyncio
import gc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from marserve.backend.manifest import Manifest
from marserve.backend.protocol import Reply
from marserve.frontend.batching.options import Batching
from marserve.frontend.configuration.config import Config
from marserve.frontend.errors import (
    DefaultVersionInUse,
    ModelNotFound,
    NoWorker,
    PredictionFailed,
    RequestExpired,
    ServerStopping,
    VersionConflict,
    VersionNotFound,
    WorkerDied,
)
from marserve.frontend.models.archives.archive import Archive
from marserve.frontend.models.host import WorkerHost
from marserve.frontend.models.model_version import ModelVersion
from marserve.frontend.models.predict_request import PredictRequest, RequestOptions
from marserve.frontend.models.registry import ModelRegistry
from marserve.frontend.models.settings.model_settings import (
    ModelSettings,
    Requested,
    resolve_settings,
)
from marserve.frontend.telemetry.metrics import Metrics
from marserve.frontend.workers.devices import DeviceAllocator


def stand_in(name: str, version: str) -> Any:
    """The register looks at names and versions only."""
    return SimpleNamespace(name=name, version=version)


# -- the register ----------------------------------------------------------------------------------


def test_the_first_version_is_the_default_until_another_is_chosen() -> None:
    registry = ModelRegistry()
    first, second = stand_in("m", "1"), stand_in("m", "2")
    registry.add(first)
    registry.add(second)
    assert registry.find("m") is first
    assert registry.find("m", "2") is second
    registry.set_default("m", "2")
    assert registry.find("m") is second


def test_models_are_listed_by_name_and_versions_by_version() -> None:
    registry = ModelRegistry()
    models = {key: stand_in(*key) for key in [("b", "1"), ("a", "2"), ("a", "1"), ("a", "10")]}
    for model in models.values():
        registry.add(model)
    assert registry.defaults() == [models["a", "2"], models["b", "1"]]
    assert registry.versions("a") == [models["a", "1"], models["a", "10"], models["a", "2"]]
    assert len(list(registry)) == 4


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda r: r.find("x"), ModelNotFound, "Model not found: x"),
        (lambda r: r.find("x", "1"), ModelNotFound, "Model not found: x"),
        (lambda r: r.versions("x"), ModelNotFound, "Model not found: x"),
        (lambda r: r.find("m", "9"), VersionNotFound, "Model version: 9 does not exist for model"),
        (lambda r: r.find("m", ""), VersionNotFound, "Model version:  does not exist"),
        (lambda r: r.set_default("x", "1"), ModelNotFound, "Model not found: x"),
        (lambda r: r.set_default("m", "9"), VersionNotFound, "Model version 9 does not exist"),
        (lambda r: r.add(stand_in("m", "1")), VersionConflict, "version 1 is already registered"),
    ],
)
def test_what_is_not_there_or_there_already_is_told(
    call: Callable[[ModelRegistry], Any], error: type[Exception], message: str
) -> None:
    registry = ModelRegistry()
    registry.add(stand_in("m", "1"))
    with pytest.raises(error, match=message):
        call(registry)


def test_the_default_leaves_last() -> None:
    registry = ModelRegistry()
    default, other = stand_in("m", "1"), stand_in("m", "2")
    registry.add(default)
    registry.add(other)
    with pytest.raises(DefaultVersionInUse):
        registry.remove(default)
    registry.remove(other)
    registry.remove(default)
    registry.remove(default)
    assert list(registry) == []
    registry.add(other)
    assert registry.find("m") is other


def test_another_model_of_the_same_name_and_version_is_left_alone() -> None:
    registry = ModelRegistry()
    registry.add(stand_in("m", "1"))
    registry.remove(stand_in("m", "1"))
    assert len(list(registry)) == 1


# -- requests to a model ---------------------------------------------------------------------------


@pytest.fixture
def serving(fakes: ModuleType, config: Config, tmp_path: Path) -> Callable[..., Any]:
    """A model version with one fake worker, closed at the end."""

    @asynccontextmanager
    async def serve(
        *lives: Any, workers: int = 1, seats: int = 100, **changes: Any
    ) -> AsyncIterator[ModelVersion]:
        requested = Requested(settings={"delay": 0.0, "queue_size": seats})
        settings: ModelSettings = replace(
            resolve_settings(requested, {}, {}, config, gpus=0, default_workers=workers), **changes
        )
        model = ModelVersion(
            Archive("m.mar", tmp_path, "m.mar", tmp_path / "root"),
            Manifest(model_name="m", model_version="1.0", handler="h", runtime="python"),
            settings,
            WorkerHost(config, fakes.FakeLauncher(*lives), DeviceAllocator(0)),
            Metrics("host"),
        )
        started, _ = model.workers.resize(workers, workers)
        for worker in started:
            await worker.first_outcome()
        try:
            yield model
        finally:
            await model.close(0)
            await fakes.settled()

    return serve


def ask(model: ModelVersion, fakes: ModuleType, body: bytes = b"x", **options: Any) -> Any:
    now = asyncio.get_running_loop().time()
    request = PredictRequest(fakes.make_input(body), now, **{"by_version": False, **options})
    return asyncio.ensure_future(model.predict(request))


def test_a_request_gets_its_prediction(
    run: Callable[..., Any], fakes: ModuleType, serving: Callable[..., Any]
) -> None:
    async def scenario() -> None:
        async with serving() as model:
            assert (await ask(model, fakes, b"cat")).body == b"cat"
            assert model.pending == 0

    run(scenario())


@pytest.mark.parametrize(
    ("answer", "error"), [(Reply(503, "no"), PredictionFailed), ("die", WorkerDied)]
)
def test_what_becomes_of_a_batch_is_told_to_its_requests(
    answer: Any,
    error: type[Exception],
    run: Callable[..., Any],
    fakes: ModuleType,
    serving: Callable[..., Any],
) -> None:
    async def scenario() -> None:
        async with serving(fakes.Life(predict=[answer])) as model:
            with pytest.raises(error):
                await ask(model, fakes)
            assert model.pending == 0

    run(scenario())


@pytest.mark.parametrize(
    ("by_version", "named"), [(True, 'Model "m" Version 1.0" has'), (False, 'Model "m" has')]
)
def test_without_a_worker_there_is_no_waiting(
    by_version: bool,
    named: str,
    run: Callable[..., Any],
    fakes: ModuleType,
    serving: Callable[..., Any],
) -> None:
    async def scenario() -> None:
        async with serving(workers=0) as model:
            with pytest.raises(NoWorker, match=f"^{named} no worker to serve inference request"):
                await ask(model, fakes, by_version=by_version)

    run(scenario())


def test_a_full_queue_refuses_the_next_and_takes_it_when_there_is_room(
    run: Callable[..., Any], fakes: ModuleType, serving: Callable[..., Any]
) -> None:
    async def scenario() -> None:
        async with serving(fakes.Life(seconds=1.0), seats=2) as model:
            accepted = [ask(model, fakes) for _ in range(3)]
            await fakes.settled()
            with pytest.raises(NoWorker):
                await ask(model, fakes)
            await asyncio.sleep(1.5)
            accepted.append(ask(model, fakes))
            assert len(await asyncio.gather(*accepted)) == 4

    run(scenario())


def test_a_request_that_waits_too_long_expires_and_gives_its_seat_back(
    run: Callable[..., Any], loop: Any, fakes: ModuleType, serving: Callable[..., Any]
) -> None:
    async def scenario() -> None:
        async with serving(fakes.Life(seconds=9.0), client_timeout=2.0) as model:
            began = loop.time()
            waiting = [ask(model, fakes) for _ in range(2)]
            results = await asyncio.gather(*waiting, return_exceptions=True)
            assert [type(one) for one in results] == [RequestExpired] * 2
            assert "clientTimeoutInMills=2000" in str(results[0])
            assert loop.time() - began == pytest.approx(2.0)
            assert (len(model.queue), model.pending) == (0, 0)

    run(scenario())


@pytest.mark.parametrize(
    ("options", "whose"),
    [
        ({}, "clientTimeoutInMills=2000"),
        ({"options": RequestOptions(timeout=1.5)}, "X-Timeout-Ms=1500"),
    ],
)
def test_a_request_that_took_too_long_to_read_reaches_no_worker(
    run: Callable[..., Any],
    loop: Any,
    fakes: ModuleType,
    serving: Callable[..., Any],
    options: dict[str, Any],
    whose: str,
) -> None:
    async def scenario() -> None:
        async with serving(client_timeout=2.0) as model:
            arrived = loop.time() - 2.0
            request = PredictRequest(fakes.make_input(b"x"), arrived, False, **options)
            with pytest.raises(RequestExpired, match=whose):
                await model.predict(request)
            with pytest.raises(RequestExpired, match=whose):
                await model.predict_all([request] * 2)
            assert len(model.batcher.history) == 0
            assert (len(model.queue), model.pending) == (0, 0)

    run(scenario())


def test_a_client_that_leaves_gives_its_seat_back(
    run: Callable[..., Any], fakes: ModuleType, serving: Callable[..., Any]
) -> None:
    async def scenario() -> None:
        async with serving(fakes.Life(seconds=1.0)) as model:
            [first, second, third] = [ask(model, fakes, body) for body in (b"a", b"b", b"c")]
            await fakes.settled()
            second.cancel()
            await fakes.settled()
            assert len(model.queue) == 1
            assert [one.body for one in await asyncio.gather(first, third)] == [b"a", b"c"]

    run(scenario())


def test_when_the_last_worker_is_given_up_those_who_wait_are_told(
    run: Callable[..., Any], fakes: ModuleType, serving: Callable[..., Any]
) -> None:
    async def scenario() -> None:
        lives = [fakes.Life(predict=["die"], seconds=1.0)]
        async with serving(*lives, max_retry_timeout=0) as model:
            results = await asyncio.gather(
                *(ask(model, fakes) for _ in range(3)), return_exceptions=True
            )
            assert [type(one) for one in results] == [WorkerDied, NoWorker, NoWorker]
            with pytest.raises(NoWorker):
                await ask(model, fakes)

    run(scenario())


def test_a_model_that_cannot_be_loaded_again_refuses_with_the_reason_until_it_can(
    run: Callable[..., Any], fakes: ModuleType, serving: Callable[..., Any]
) -> None:
    why = "Its worker has failed: ValueError: no weights"
    broken = fakes.Life(load=Reply(500, "ValueError: no weights"))

    async def scenario() -> None:
        async with serving(fakes.Life(), broken, broken, fakes.Life()) as model:
            launcher = model._host.launcher
            launcher.workers[0].crash()
            await asyncio.sleep(0.5)
            assert len(launcher.workers) == 2
            waiting = ask(model, fakes, b"a")  # one failure may pass
            await fakes.settled()
            assert len(model.queue) == 1
            with pytest.raises(NoWorker, match=why):
                await waiting
            assert len(launcher.workers) == 3
            with pytest.raises(NoWorker, match=why):
                await ask(model, fakes, b"b")
            with pytest.raises(NoWorker, match=why):
                await ask(model, fakes, describe=True)
            await asyncio.sleep(10.0)
            assert (await ask(model, fakes, b"c")).body == b"c"

    run(scenario())


def test_a_worker_that_can_serve_is_enough_to_take_requests(
    run: Callable[..., Any], fakes: ModuleType, serving: Callable[..., Any]
) -> None:
    broken = fakes.Life(load=Reply(500, "ValueError: no weights"))

    async def scenario() -> None:
        async with serving(fakes.Life(), broken) as model:
            [second], _ = model.workers.resize(2, 2)
            assert await second.first_outcome() is not None
            assert (await ask(model, fakes, b"a")).body == b"a"
            await model.workers.retire(model.workers.take_out(next(iter(model.workers))), 0)
            with pytest.raises(NoWorker, match="no weights"):
                await ask(model, fakes, b"b")

    run(scenario())


def test_draining_waits_for_those_who_are_in_and_refuses_the_rest(
    run: Callable[..., Any], loop: Any, fakes: ModuleType, serving: Callable[..., Any]
) -> None:
    async def scenario() -> None:
        async with serving(fakes.Life(seconds=1.0)) as model:
            inside = [ask(model, fakes, body) for body in (b"a", b"b")]
            await fakes.settled()
            model.refuse(ServerStopping())
            with pytest.raises(ServerStopping):
                await ask(model, fakes)
            began = loop.time()
            await model.close(60.0)
            assert loop.time() - began == pytest.approx(2.0)
            assert [one.result().body for one in inside] == [b"a", b"b"]

    run(scenario())


def test_draining_does_not_outlast_its_time(
    run: Callable[..., Any], loop: Any, fakes: ModuleType, serving: Callable[..., Any]
) -> None:
    async def scenario() -> None:
        async with serving(fakes.Life(seconds=9.0)) as model:
            inside = [ask(model, fakes) for _ in range(2)]
            await fakes.settled()
            model.refuse(ServerStopping())
            began = loop.time()
            await model.close(2.0)
            assert loop.time() - began == pytest.approx(2.0)
            results = await asyncio.gather(*inside, return_exceptions=True)
            assert [type(one) for one in results] == [WorkerDied, ServerStopping]

    run(scenario())


@pytest.mark.parametrize(("describe", "header"), [(False, None), (True, "True")])
def test_a_client_cannot_order_a_description(
    run: Callable[..., Any],
    fakes: ModuleType,
    serving: Callable[..., Any],
    describe: bool,
    header: str | None,
) -> None:
    seen: list[Any] = []

    def answer(batch: Any) -> Reply:
        seen.extend(input_.headers.get("describe") for input_ in batch.inputs)
        reply: Reply = fakes.echo(batch)
        return reply

    async def scenario() -> None:
        async with serving(fakes.Life(predict=[answer])) as model:
            input_ = fakes.make_input(**({} if describe else {"describe": "True"}))
            await model.predict(PredictRequest(input_, 1000.0, False, describe=describe))
            assert seen == [header]

    run(scenario())


# -- the rows of one request -----------------------------------------------------------------------


async def answers_to(model: ModelVersion, fakes: ModuleType, *bodies: bytes) -> list[bytes]:
    """Enter a request of these rows, and wait for all of them in order."""
    now = asyncio.get_running_loop().time()
    requests = [PredictRequest(fakes.make_input(body), now, False) for body in bodies]
    return [bytes(one.body) for one in await model.predict_all(requests)]


def test_rows_leave_together_and_are_answered_in_order(
    run: Callable[..., Any], fakes: ModuleType, serving: Callable[..., Any]
) -> None:
    async def scenario() -> None:
        seen: list[int] = []

        def answer(batch: Any) -> Reply:
            seen.append(len(batch.inputs))
            reply: Reply = fakes.echo(batch)
            return reply

        batching = Batching(size=4, delay=0.0)
        async with serving(fakes.Life(predict=[answer]), batching=batching) as model:
            rows = [b"%d" % number for number in range(10)]
            assert await answers_to(model, fakes, *rows) == rows
            assert seen == [4, 4, 2]
            assert model.pending == 0

    run(scenario())


@pytest.mark.parametrize("retries", [True, False])
@pytest.mark.parametrize(
    ("answer", "error"), [(Reply(503, "no"), PredictionFailed), ("die", WorkerDied)]
)
def test_a_row_that_fails_leaves_none_of_the_others(
    answer: Any,
    error: type[Exception],
    retries: bool,
    run: Callable[..., Any],
    fakes: ModuleType,
    serving: Callable[..., Any],
) -> None:
    async def scenario() -> None:
        batching = Batching(size=3, delay=0.0, isolates=retries, retries=retries)
        async with serving(fakes.Life(predict=[answer]), batching=batching) as model:
            with pytest.raises(error):
                await answers_to(model, fakes, *[b"x"] * 7)
            assert (len(model.queue), model.pending) == (0, 0)
            await fakes.settled()
        gc.collect()  # a failure that nobody looked at is told by then, and `run` minds

    run(scenario())


def test_a_client_that_leaves_gives_the_seats_of_its_rows_back(
    run: Callable[..., Any], fakes: ModuleType, serving: Callable[..., Any]
) -> None:
    async def scenario() -> None:
        async with serving(fakes.Life(seconds=1.0)) as model:
            waiting = asyncio.ensure_future(answers_to(model, fakes, *[b"x"] * 3))
            await asyncio.sleep(1.5)
            assert (len(model.queue), model.pending) == (1, 3)
            waiting.cancel()
            await fakes.settled()
            assert (len(model.queue), model.pending) == (0, 0)

    run(scenario())


def test_rows_need_a_seat_each(
    run: Callable[..., Any], fakes: ModuleType, serving: Callable[..., Any]
) -> None:
    async def scenario() -> None:
        async with serving(fakes.Life(seconds=1.0), seats=2) as model:
            first = ask(model, fakes)
            await fakes.settled()
            with pytest.raises(NoWorker, match='queue of model "m" has 2 free seats, and the list'):
                await answers_to(model, fakes, *[b"x"] * 3)
            assert (len(model.queue), model.pending) == (0, 1)
            assert await answers_to(model, fakes, *[b"x"] * 2) == [b"x"] * 2
            await first

    run(scenario())


def test_rows_expire_as_one(
    run: Callable[..., Any], loop: Any, fakes: ModuleType, serving: Callable[..., Any]
) -> None:
    async def scenario() -> None:
        async with serving(fakes.Life(seconds=9.0), client_timeout=2.0) as model:
            began = loop.time()
            with pytest.raises(RequestExpired, match="clientTimeoutInMills=2000"):
                await answers_to(model, fakes, *[b"x"] * 3)
            assert loop.time() - began == pytest.approx(2.0)
            assert (len(model.queue), model.pending) == (0, 0)
        gc.collect()

    run(scenario())
