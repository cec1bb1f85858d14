import asyncio
import itertools
import re
from collections.abc import Sequence
from contextlib import asynccontextmanager
from functools import partial
from types import NoneType
from typing import Any

import fakes
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marserve.backend.framing import encode
from marserve.backend.protocol import Load, Loaded, LoadFailure, Prediction, Reply, Trials
from marserve.frontend.batching.batcher import Batcher
from marserve.frontend.batching.job_queue import JobQueue
from marserve.frontend.batching.options import Batching
from marserve.frontend.errors import PredictionFailed, WorkerDied
from marserve.frontend.telemetry.metrics import Metrics
from marserve.frontend.telemetry.model_metrics import ModelMetrics
from marserve.frontend.workers.batch_validation import BatchValidation
from marserve.frontend.workers.dispatch.batched import Batched
from marserve.frontend.workers.failures import ConnectionLost, Diagnostics, LoadFailed
from marserve.frontend.workers.launchers.local_process import WorkerSpec
from marserve.frontend.workers.supervisor import START_SECONDS, WorkerSupervisor
from marserve.frontend.workers.worker_state import TRANSITIONS, WorkerState

GARBAGE = b"\xff" * 10
RESPONSE_SECONDS = 60.0
STARTUP_SECONDS = 20.0
RETRY_SECONDS = 300.0


class Watched(WorkerSupervisor):
    """Remembers the states it was in."""

    @property
    def state(self) -> WorkerState:
        return self.states[-1]

    @state.setter
    def state(self, state: WorkerState) -> None:
        self.states = [*getattr(self, "states", ()), state]


class Bench:
    """One supervisor over fake workers, and the clients of its model."""

    def __init__(
        self,
        *lives: Any,
        size: int = 2,
        window: float = RETRY_SECONDS,
        retries: bool = True,
        has_workers_left: bool = True,
        profiled_sizes: Sequence[int] = (),
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.launcher = fakes.FakeLauncher(*lives)
        self.metrics = Metrics("host")
        self.queue = JobQueue(100)
        batching = Batching(size=size, delay=0.0, retries=retries)
        self.batcher = Batcher(self.queue, batching, self.loop, self.loop.time)
        self.ended = 0
        self.supervisor = Watched(
            worker_id=9000,
            spec=WorkerSpec("W-9000-m_1.0", {}, (), "/m", 0),
            load=Load(
                "m",
                "/m",
                "h",
                size,
                None,
                True,
                1000,
                "1",
                trials=Trials(sizes=[*profiled_sizes]),
            ),
            startup_timeout=STARTUP_SECONDS,
            retry_window=window,
            make_dispatch=partial(
                Batched,
                timeout=RESPONSE_SECONDS,
                has_workers_left=lambda: has_workers_left,
            ),
            batcher=self.batcher,
            validation=BatchValidation("m", self.batcher, list),
            launcher=self.launcher,
            metrics=ModelMetrics(self.metrics, "m", "1.0"),
        )

    def start(self) -> None:
        def on_exit() -> None:
            self.ended += 1

        self.supervisor.start(on_exit)

    async def ready(self) -> None:
        deadline = self.loop.time() + 1000.0
        while not self.supervisor.is_ready:
            assert self.loop.time() < deadline
            await asyncio.sleep(0.1)

    def put(self, *bodies: bytes) -> list[asyncio.Future[Prediction]]:
        jobs = [
            fakes.AwaitedJob(fakes.make_input(body), self.loop.time(), self.loop.create_future())
            for body in bodies
        ]
        for job in jobs:
            self.batcher.put(job)
        return [job.future for job in jobs]

    async def outcomes(self, *bodies: bytes) -> list[Any]:
        """What the clients get: bodies, or the errors."""
        results = await asyncio.gather(*self.put(*bodies), return_exceptions=True)
        return [each.body if isinstance(each, Prediction) else each for each in results]

    def counted(self, name: str) -> float:
        labels = {"model_name": "m", "model_version": "1.0", "hostname": "host"}
        return fakes.sample_value(self.metrics, f"{name}_total", labels) or 0.0


@pytest.fixture
def bench():
    """A bench that is started, and stopped at the end."""

    @asynccontextmanager
    async def make(*lives, started=True, **options):
        setup = Bench(*lives, **options)
        if started:
            setup.start()
        try:
            yield setup
        finally:
            await setup.supervisor.stop(0)
            await fakes.drain_loop()

    return make


# -- a good life -----------------------------------------------------------------------------------


def test_a_worker_loads_its_model_and_serves_in_order(run, bench):
    async def scenario():
        async with bench() as setup:
            assert await setup.supervisor.first_outcome() is None
            assert setup.supervisor.is_ready
            assert setup.supervisor.pid == 4001
            assert await setup.outcomes(b"a", b"b", b"c") == [b"a", b"b", b"c"]
            [worker] = setup.launcher.workers
            assert worker.loaded[0].model_name == "m"
            assert worker.batches == [[b"a"], [b"b", b"c"]]

    run(scenario())


def test_a_worker_has_one_batch_in_hand_and_the_rest_waits(run, bench):
    async def scenario():
        async with bench(fakes.Life(seconds=1.0)) as setup:
            await setup.ready()
            futures = setup.put(b"a", b"b", b"c", b"d")
            await asyncio.sleep(0.5)
            assert len(setup.queue) == 3
            await asyncio.gather(*futures)
            assert setup.launcher.workers[0].batches == [[b"a"], [b"b", b"c"], [b"d"]]

    run(scenario())


@pytest.mark.parametrize("code", [299, 503, 507])
def test_a_failure_that_is_reported_is_the_batchs_and_the_worker_lives(code, run, bench):
    async def scenario():
        life = fakes.Life(predict=[Reply(code, "Prediction failed"), fakes.echo])
        async with bench(life) as setup:
            await setup.ready()
            [error] = await setup.outcomes(b"a")
            assert isinstance(error, PredictionFailed)
            assert (error.status, error.message) == (code, "Prediction failed")
            assert await setup.outcomes(b"b") == [b"b"]
            assert len(setup.launcher.workers) == 1
            assert setup.counted("marserve_failed_batches") == 1

    run(scenario())


def test_a_batch_too_large_to_be_sent_fails_alone(run, bench):
    class Huge(bytes):
        def __len__(self):
            return 1 << 32

    async def scenario():
        async with bench() as setup:
            await setup.ready()
            [error] = await setup.outcomes(Huge())
            assert (type(error), error.status) == (PredictionFailed, 507)
            assert await setup.outcomes(b"b") == [b"b"]

    run(scenario())


# -- loading ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [500, 507])
def test_a_load_that_fails_is_reported_with_its_code_and_tried_again(code, run, bench):
    async def scenario():
        async with bench(
            fakes.Life(load=LoadFailure(code, "ValueError: no")), fakes.Life()
        ) as setup:
            outcome = await setup.supervisor.first_outcome()
            assert isinstance(outcome, LoadFailed)
            assert (outcome.code, str(outcome)) == (code, "ValueError: no")
            assert setup.supervisor.state is WorkerState.FAILED
            failure = setup.supervisor.last_failure
            assert failure is not None
            assert failure.reason == "ValueError: no"
            assert setup.supervisor.pid is None
            await setup.ready()
            assert setup.supervisor.last_failure is failure
            assert setup.launcher.starts[1] - setup.launcher.starts[0] == pytest.approx(1.0)
            assert isinstance(await setup.supervisor.first_outcome(), LoadFailed)

    run(scenario())


@pytest.mark.parametrize(("runs_out_of_memory", "code"), [(True, 507), (False, 500)])
def test_a_load_that_the_kernel_ends_for_want_of_memory_says_so_by_its_code(
    runs_out_of_memory, code, run, bench
):
    async def scenario():
        life = fakes.Life(load="die", runs_out_of_memory=runs_out_of_memory)
        async with bench(life) as setup:
            outcome = await setup.supervisor.first_outcome()
            assert isinstance(outcome, ConnectionLost)
            assert outcome.code == code

    run(scenario())


def test_every_client_of_a_model_that_cannot_load_got_megabytes_of_missing_weights(run, bench):
    async def scenario():
        missing = "RuntimeError: missing " + "weight, " * 1_000_000
        async with bench(fakes.Life(load=LoadFailure(500, missing))) as setup:
            await setup.supervisor.first_outcome()
            failure = setup.supervisor.last_failure
            assert failure is not None
            assert failure.reason.startswith("RuntimeError: missing weight, ")
            assert failure.reason.endswith("characters more are in the model's log)")
            assert len(failure.reason) < 5000

    run(scenario())


@pytest.mark.parametrize(
    ("life", "why", "seconds"),
    [
        ({"load": "die"}, "Worker disconnected", 0.0),
        ({"load": GARBAGE}, "broke the protocol", 0.0),
        ({"load": "hang"}, "did not respond in given time", STARTUP_SECONDS),
        ({"load": "stuck"}, "startup time out", START_SECONDS),
        ({"start_seconds": 1e6}, "startup time out", START_SECONDS),
        ({"start_seconds": 100.0, "load": "stuck"}, "startup time out", START_SECONDS),
        ({"start_error": OSError("no more processes")}, "no more processes", 0.0),
        ({"start_error": EOFError("unexpected EOF")}, "unexpected EOF", 0.0),
    ],
)
def test_a_start_that_comes_to_nothing_is_tried_again(life, why, seconds, run, loop, bench):
    async def scenario():
        began = loop.time()
        async with bench(fakes.Life(**life), fakes.Life()) as setup:
            assert why in str(await setup.supervisor.first_outcome())
            assert loop.time() - began == pytest.approx(seconds)
            await setup.ready()
            assert setup.counted("marserve_worker_failures") == 1
            assert await setup.outcomes(b"a") == [b"a"]

    run(scenario())


@pytest.mark.parametrize("load", ["die", "hang"])
def test_a_worker_that_is_lost_while_it_tries_out_sizes_loads_without(load, run, bench):
    async def scenario():
        async with bench(fakes.Life(load=load), fakes.Life(), profiled_sizes=[1, 2]) as setup:
            assert await setup.supervisor.first_outcome() is None
            assert setup.supervisor.is_ready
            loads = [load for worker in setup.launcher.workers for load in worker.loaded]
            assert [load.trials.sizes for load in loads] == [[1, 2], []]

    run(scenario())


@pytest.mark.parametrize("window", [0.0, RETRY_SECONDS])
def test_a_worker_that_is_lost_without_trying_out_sizes_too_is_reported(window, run, bench):
    async def scenario():
        async with bench(fakes.Life(load="die"), profiled_sizes=[1], window=window) as setup:
            assert "Worker disconnected" in str(await setup.supervisor.first_outcome())

    run(scenario())


# -- sudden ends -----------------------------------------------------------------------------------


DEATHS = ["die", GARBAGE, Reply(predictions=[]), Reply(predictions=[Prediction(b"")] * 4)]


@pytest.mark.parametrize("answer", DEATHS)
def test_what_a_lost_worker_held_is_run_again_each_by_itself_and_before_others(
    answer, run, loop, bench
):
    async def scenario():
        life = fakes.Life(predict=[fakes.echo, answer], seconds=0.5)
        async with bench(life, fakes.Life(), size=3) as setup:
            await setup.ready()
            began = loop.time()
            bodies = [b"x", b"a", b"b", b"c", b"d", b"e"]
            assert await setup.outcomes(*bodies) == bodies
            assert loop.time() - began == pytest.approx(2 * 0.5)
            assert setup.launcher.workers[0].has_exited
            assert setup.launcher.workers[1].batches == [[b"a"], [b"b"], [b"c"], [b"d", b"e"]]
            assert setup.supervisor.pid == 4002
            assert setup.counted("marserve_failed_batches") == 1
            assert setup.counted("marserve_worker_failures") == 1
            assert setup.counted("marserve_retried_requests") == 3

    run(scenario())


def dies_of(poison: bytes) -> Any:
    """A life that ends with a certain request."""

    def answer(batch: Any) -> Any:
        bodies = [each.parts[0].body for each in batch.inputs]
        return "die" if poison in bodies else fakes.echo(batch)

    return fakes.Life(predict=[answer])


@pytest.mark.parametrize("place", range(4))
def test_whoever_kills_its_worker_dies_of_the_second_and_takes_nobody_along(place, run, bench):
    async def scenario():
        async with bench(dies_of(b"bad"), size=4) as setup:
            await setup.ready()
            bodies = [b"a", b"b", b"c"]
            bodies.insert(place, b"bad")
            _, *outcomes = await setup.outcomes(b"x", *bodies, b"later")
            assert isinstance(outcomes.pop(place), WorkerDied)
            assert outcomes == [b"a", b"b", b"c", b"later"]
            assert setup.counted("marserve_worker_failures") == 2
            assert setup.counted("marserve_retried_requests") == 4

    run(scenario())


@pytest.mark.parametrize("options", [{"retries": False}, {"has_workers_left": False}])
def test_nothing_is_run_again_where_that_is_not_wanted_or_nobody_could(options, run, bench):
    async def scenario():
        life = fakes.Life(predict=[fakes.echo, "die"])
        async with bench(life, fakes.Life(), **options) as setup:
            await setup.ready()
            x, a, b, c = await setup.outcomes(b"x", b"a", b"b", b"c")
            assert (x, type(a), type(b), c) == (b"x", WorkerDied, WorkerDied, b"c")
            assert setup.counted("marserve_retried_requests") == 0

    run(scenario())


def test_whoever_has_left_is_not_run_again(run, bench):
    async def scenario():
        life = fakes.Life(predict=[fakes.echo, "die"], seconds=1.0)
        async with bench(life, fakes.Life()) as setup:
            await setup.ready()
            x, a, b = setup.put(b"x", b"a", b"b")
            await x
            a.cancel()
            assert (await b).body == b"b"
            assert setup.launcher.workers[1].batches == [[b"b"]]

    run(scenario())


def test_a_single_request_that_a_worker_hangs_over_is_not_run_again(run, loop, bench):
    async def scenario():
        async with bench(fakes.Life(predict=["hang"]), fakes.Life()) as setup:
            await setup.ready()
            began = loop.time()
            [lost, *others] = setup.put(b"a", b"b", b"c")
            assert isinstance((await asyncio.gather(lost, return_exceptions=True))[0], WorkerDied)
            assert loop.time() - began == pytest.approx(RESPONSE_SECONDS)
            assert [each.body for each in await asyncio.gather(*others)] == [b"b", b"c"]
            assert setup.counted("marserve_retried_requests") == 0

    run(scenario())


def test_a_request_that_a_worker_hangs_over_costs_its_mates_one_timeout(run, loop, bench):
    def answer(batch):
        bodies = [each.parts[0].body for each in batch.inputs]
        return "hang" if b"bad" in bodies else fakes.echo(batch)

    async def scenario():
        async with bench(fakes.Life(predict=[answer]), size=3) as setup:
            await setup.ready()
            began = loop.time()
            outcomes = await setup.outcomes(b"x", b"a", b"b", b"bad")
            assert outcomes[:3] == [b"x", b"a", b"b"]
            assert isinstance(outcomes[3], WorkerDied)
            assert loop.time() - began == pytest.approx(2 * RESPONSE_SECONDS)

    run(scenario())


def test_a_worker_that_dies_idle_is_replaced_and_nobody_notices(run, bench):
    async def scenario():
        async with bench() as setup:
            await setup.ready()
            setup.launcher.workers[0].crash()
            await asyncio.sleep(0.1)  # no back-off
            assert setup.supervisor.states[-2:] == [WorkerState.LOADING, WorkerState.READY]
            assert WorkerState.FAILED in setup.supervisor.states
            assert await setup.outcomes(b"a", b"b") == [b"a", b"b"]
            assert setup.supervisor.pid == 4002

    run(scenario())


def test_a_worker_whose_children_hold_the_wire_is_missed_all_the_same(run, bench, caplog):
    async def scenario():
        async with bench(fakes.Life(predict=["hang"]), fakes.Life()) as setup:
            await setup.ready()
            [job, behind] = setup.put(b"a", b"b")
            setup.launcher.workers[0].vanish()
            await asyncio.sleep(1.0)
            assert "Worker process ended." in caplog.text
            assert (await job).body == b"a"
            assert (await behind).body == b"b"

    run(scenario())


def test_a_failure_is_reported_until_the_worker_has_answered_again(run, bench, caplog):
    diagnostics = Diagnostics(["File x, line 1 in handle"], ["good bye", "[INFO] forged\x1b"])

    async def scenario():
        deadly = fakes.Life(predict=["die"], diagnostics=diagnostics)
        async with bench(deadly, deadly, fakes.Life()) as setup:
            await setup.ready()
            [error] = await setup.outcomes(b"a")
            assert str(error) == "Worker died. Its process was killed by SIGSEGV."
            await setup.ready()
            failure = setup.supervisor.last_failure
            assert failure.reason == "Worker disconnected. Its process was killed by SIGSEGV."
            assert failure.diagnostics == diagnostics
            assert await setup.outcomes(b"b") == [b"b"]
            assert setup.supervisor.last_failure is failure

    run(scenario())
    assert "killed by SIGSEGV.\nIts Python stacks:\n    File x, line 1 in handle\n" in caplog.text
    assert "\n    good bye\n    [INFO] forged\\x1b\n" in caplog.text


def test_a_timeout_says_that_it_was_one_and_leaves_the_lines_that_alerts_match(run, bench, caplog):
    caplog.set_level("INFO")

    async def scenario():
        async with bench(fakes.Life(predict=["hang"])) as setup:
            for _ in range(2):
                await setup.ready()
                [error] = await setup.outcomes(b"a")
                assert (
                    str(error) == "Worker died. Timeout: no answer within responseTimeout (60 s)."
                )
            assert [worker.stacks_written for worker in setup.launcher.workers[:2]] == [1, 1]
            await asyncio.sleep(60.0)

    run(scenario())
    lines = [line for record in caplog.records for line in record.getMessage().splitlines()]
    assert caplog.records[-1].worker == "W-9000-m_1.0"
    first = lines.index("Number or consecutive unsuccessful inference 1")
    assert lines[first + 1 : first + 4] == [
        "Backend worker error",
        "org.pytorch.serve.wlm.WorkerInitializationException: "
        "Backend worker did not respond in given time",
        "W-9000-m_1.0: Timeout: no answer within responseTimeout (60 s).",
    ]
    assert "Number or consecutive unsuccessful inference 2" in lines
    rest = lines[first:]
    assert any(re.fullmatch(r"Auto recovery start timestamp: \d{13}", line) for line in rest)
    assert rest.count("Auto recovery succeeded, reset recoveryStartTS") == 2


def test_a_load_that_tries_out_batches_times_out_in_the_words_of_torchserve(run, bench, caplog):
    async def scenario():
        hangs = fakes.Life(load="hang")
        async with bench(hangs, fakes.Life(), profiled_sizes=[1]) as setup:
            await setup.ready()

    run(scenario())
    lines = [line for record in caplog.records for line in record.getMessage().splitlines()]
    place = lines.index("Backend worker error")
    assert lines[place + 1 : place + 3] == [
        "org.pytorch.serve.wlm.WorkerInitializationException: "
        "Backend worker did not respond in given time",
        f"W-9000-m_1.0: Timeout: no answer within startupTimeout ({STARTUP_SECONDS:g} s). "
        "It loaded, or tried out batches.",
    ]


def test_a_model_that_was_never_loaded_is_distinguished_from_one_that_may_be_loaded_again(
    run, bench, caplog
):
    broken = fakes.Life(load=LoadFailure(500, "ValueError: no"))

    async def scenario():
        loads = []
        async with bench(
            broken, fakes.Life(), broken, broken, fakes.Life(), started=False
        ) as setup:
            setup.supervisor.start(lambda: None, lambda: loads.append(setup.supervisor.cannot_load))
            await setup.ready()
            setup.launcher.workers[-1].crash()
            await asyncio.sleep(60.0)
            assert setup.supervisor.is_ready
        # It failed; was loaded; was lost; failed; failed again; was loaded.
        assert loads == [True, False, False, False, True, False]

    caplog.set_level("INFO")
    run(scenario())
    changes = re.findall(r"State change WORKER_(\w+) -> WORKER_(\w+)", caplog.text)
    failed = [("STARTED", "ERROR"), ("ERROR", "STOPPED"), ("STOPPED", "STARTED")]
    loaded, lost = ("STARTED", "MODEL_LOADED"), ("MODEL_LOADED", "STOPPED")
    again = [lost, ("STOPPED", "STARTED"), *failed, *failed]
    assert changes == [*failed, loaded, *again, loaded, lost]


def test_a_client_that_left_does_not_hurt_its_batch_mates(run, bench):
    async def scenario():
        async with bench(fakes.Life(seconds=1.0)) as setup:
            await setup.ready()
            [_, second, third] = setup.put(b"a", b"b", b"c")
            await asyncio.sleep(1.5)
            second.cancel()
            assert (await third).body == b"c"
            assert setup.launcher.workers[0].batches == [[b"a"], [b"b", b"c"]]

    run(scenario())


def test_the_pauses_between_the_tries_grow_until_the_window_is_over(run, bench):
    async def scenario():
        async with bench(fakes.Life(load="die"), window=10.0) as setup:
            began = setup.loop.time()
            while not setup.ended:
                assert setup.supervisor.is_healthy == (setup.loop.time() - began <= 10.0)
                await asyncio.sleep(0.3)
            starts = setup.launcher.starts
            pauses = [b - a for a, b in itertools.pairwise(starts)]
            assert pauses == pytest.approx([1, 1, 2, 3, 5])
            assert setup.supervisor.state is WorkerState.STOPPED
            assert not setup.supervisor.is_healthy
            assert setup.ended == 1

    run(scenario())


def test_a_worker_that_came_up_again_has_its_whole_window_again(run, bench):
    async def scenario():
        lives = [fakes.Life(load="die"), fakes.Life(), fakes.Life(load="die"), fakes.Life()]
        async with bench(*lives, window=5.0) as setup:
            await setup.ready()
            await asyncio.sleep(100.0)
            setup.launcher.workers[1].crash()
            await asyncio.sleep(0.1)
            await setup.ready()
            assert len(setup.launcher.starts) == 4

    run(scenario())


# -- the end ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("drain", [0.0, 10.0])
def test_an_idle_worker_leaves_by_itself(drain, run, loop, bench):
    async def scenario():
        async with bench() as setup:
            await setup.ready()
            began = loop.time()
            await setup.supervisor.stop(drain)
            assert loop.time() == began
            assert setup.supervisor.state is WorkerState.STOPPED
            assert setup.launcher.workers[0].graces == [2.0]
            assert setup.ended == 1
            [job] = setup.put(b"late")
            await asyncio.sleep(1.0)
            assert not job.done()
            job.cancel()

    run(scenario())


@pytest.mark.parametrize(
    ("drain", "seconds", "outcome"),
    [
        (10.0, 5.0, b"a"),
        (2.0, 2.0, WorkerDied),
        (0, 0, WorkerDied),
    ],
)
def test_a_busy_worker_may_finish_its_batch_in_the_time_it_is_given(
    drain, seconds, outcome, run, loop, bench
):
    async def scenario():
        async with bench(fakes.Life(seconds=5.0)) as setup:
            await setup.ready()
            [job, behind] = setup.put(b"a", b"b")
            began = loop.time()
            await setup.supervisor.stop(drain)
            assert loop.time() - began == pytest.approx(seconds)
            [result] = await asyncio.gather(job, return_exceptions=True)
            assert outcome in (getattr(result, "body", None), type(result))
            assert setup.launcher.workers[0].graces == [2.0 if outcome == b"a" else 0.0]
            assert not behind.done()
            behind.cancel()

    run(scenario())


@pytest.mark.parametrize("has_workers_left", [True, False])
def test_a_worker_that_dies_while_it_drains_is_not_replaced(has_workers_left, run, loop, bench):
    async def scenario():
        life = fakes.Life(predict=["die"], seconds=1.0)
        async with bench(life, has_workers_left=has_workers_left) as setup:
            await setup.ready()
            [job] = setup.put(b"a")
            began = loop.time()
            await setup.supervisor.stop(10.0)
            assert loop.time() - began == pytest.approx(1.0)
            if has_workers_left:
                assert len(setup.queue) == 1
                assert job.cancel()
            else:
                assert isinstance(job.exception(), WorkerDied)
            assert len(setup.launcher.starts) == 1
            assert setup.supervisor.state is WorkerState.STOPPED

    run(scenario())


@pytest.mark.parametrize(
    "life",
    [{"start_seconds": 10.0}, {"load": "hang"}, {"load": LoadFailure(500, "no")}],
    ids=["starting", "loading", "waiting for the next try"],
)
def test_a_worker_can_be_stopped_before_it_serves(life, run, loop, bench):
    async def scenario():
        async with bench(fakes.Life(**life)) as setup:
            await asyncio.sleep(0.5)
            began = loop.time()
            await setup.supervisor.stop(10.0)
            await setup.supervisor.stop(10.0)
            assert loop.time() == began
            assert setup.supervisor.state is WorkerState.STOPPED
            assert setup.ended == 1
            assert isinstance(await setup.supervisor.first_outcome(), LoadFailed | ConnectionLost)
            assert all(worker.has_exited for worker in setup.launcher.workers)

    run(scenario())


def test_a_worker_stopped_in_the_turn_it_was_started_says_so(run, bench):
    async def scenario():
        async with bench() as setup:
            waiting = asyncio.ensure_future(setup.supervisor.first_outcome())
            await setup.supervisor.stop(0)
            done, _ = await asyncio.wait({waiting}, timeout=1.0)
            assert done
            assert setup.supervisor.state is WorkerState.STOPPED

    run(scenario())


def test_a_worker_that_was_never_started_is_stopped_by_nothing(run, bench):
    async def scenario():
        async with bench(started=False) as setup:
            await setup.supervisor.stop(1.0)
            assert setup.launcher.starts == []

    run(scenario())


# -- the table -------------------------------------------------------------------------------------


def test_the_table_of_states_is_total_and_everybody_can_end():
    assert set(TRANSITIONS) == set(WorkerState)
    for state, nexts in TRANSITIONS.items():
        assert state not in nexts
        assert (WorkerState.STOPPED in nexts) == (state is not WorkerState.STOPPED)
    reached = {WorkerState.STARTING}.union(*TRANSITIONS.values())
    assert reached == set(WorkerState)


STARTS = st.sampled_from([None, None, None, OSError("no")])
LOADS = st.sampled_from(
    [Loaded(), Loaded(), Loaded(), LoadFailure(507, "no"), "die", "hang", GARBAGE]
)
ANSWERS = st.sampled_from(["echo", "echo", "die", "hang", GARBAGE, Reply(503, "no"), Reply()])
SECONDS = st.sampled_from([0.0, 0.7, 3.0, 30.0])
LIVES = st.lists(
    st.tuples(STARTS, SECONDS, LOADS, st.lists(ANSWERS, min_size=1, max_size=3), SECONDS),
    min_size=1,
    max_size=5,
)


async def _whole_life(lives: Any, until: float, drain: float) -> Bench:
    made = [
        fakes.Life(
            start_error, start_seconds, load, [fakes.echo if a == "echo" else a for a in ans], busy
        )
        for start_error, start_seconds, load, ans, busy in lives
    ]
    setup = Bench(*made)
    setup.start()
    clients = []
    for _ in range(4):
        clients += setup.put(b"a", b"b")
        await asyncio.sleep(until / 4)
    await setup.supervisor.stop(drain)
    await fakes.drain_loop()
    for client in clients:
        assert client.cancel() or isinstance(
            client.exception(), WorkerDied | PredictionFailed | NoneType
        )
    return setup


@settings(max_examples=60)
@given(LIVES, st.sampled_from([0.1, 1.0, 5.0, 100.0, 1000.0]), st.sampled_from([0.0, 2.0, 100.0]))
def test_whatever_happens_the_table_is_kept_and_nothing_is_left(lives, until, drain):
    loop = fakes.VirtualLoop()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.monotonic", loop.time)
        try:
            setup = loop.run(_whole_life(lives, until, drain))
        finally:
            loop.close()
    states = setup.supervisor.states
    assert states[-1] is WorkerState.STOPPED
    assert all(after in TRANSITIONS[before] for before, after in itertools.pairwise(states))
    assert all(worker.has_exited for worker in setup.launcher.workers)
    assert setup.ended == 1
    assert setup.supervisor.pid is None


@pytest.mark.parametrize("turns", [None, 0, 1, 2, 3])
def test_a_worker_stopped_in_the_turn_its_process_arrives_stops(turns, run, bench):
    async def scenario():
        async with bench(started=False) as setup:
            arrival = asyncio.get_running_loop().create_future()

            async def start(_spec):
                try:
                    return await arrival
                except asyncio.CancelledError:  # a cancelled start leaves no process
                    await arrival.result().stop(0)
                    raise

            setup.launcher.start = start
            setup.start()
            await asyncio.sleep(1.0)
            process = fakes.FakeWorker(4711, fakes.Life())
            arrival.set_result(process)
            stopping = (
                None if turns is not None else asyncio.ensure_future(setup.supervisor.stop(0))
            )
            for _ in range(turns or 0):
                await asyncio.sleep(0)
            await (stopping or setup.supervisor.stop(0))
            assert setup.supervisor.is_stopped
            assert process.has_exited

    run(scenario())


def test_stopping_can_be_asked_for_twice_and_abandoned(run, bench):
    async def scenario():
        async with bench(fakes.Life(seconds=5.0)) as setup:
            await setup.ready()
            [job] = setup.put(b"a")
            first = asyncio.ensure_future(setup.supervisor.stop(10.0))
            await asyncio.sleep(1.0)
            first.cancel()
            await setup.supervisor.stop(10.0)
            assert (await job).body == b"a"
            assert setup.launcher.workers[0].has_exited

    run(scenario())


def test_a_cancelled_stop_leaves_no_process_id_behind(run, bench):
    async def scenario():
        async with bench(fakes.Life(stop_seconds=60.0)) as setup:
            await setup.ready()
            stopping = asyncio.ensure_future(setup.supervisor.stop(0))
            await asyncio.sleep(1.0)
            assert setup.supervisor.pid is not None
            for task in asyncio.all_tasks() - {asyncio.current_task(), stopping}:
                task.cancel()  # as `asyncio.run` does at its end
            await stopping
            assert setup.supervisor.pid is None
            assert setup.supervisor.is_stopped

    run(scenario())


def test_a_worker_that_is_lost_as_it_answers_its_load_gets_no_batch(run):
    load = b"".join(encode(Loaded())) * 2  # the second breaks the protocol, in the same turn

    async def scenario():
        bench = Bench(fakes.Life(load=load), fakes.Life(), retries=False)
        bench.start()
        assert await bench.outcomes(b"innocent") == [b"innocent"]
        assert bench.supervisor.states.count(WorkerState.READY) == 1
        await bench.supervisor.stop(0)

    run(scenario())


def test_a_lost_worker_is_not_ready_while_the_cause_of_its_end_is_looked_for(run):
    async def scenario():
        bench = Bench()
        bench.start()
        await bench.ready()

        async def still_there(seconds):
            await asyncio.sleep(seconds)
            return ""

        (worker,) = bench.launcher.workers
        worker.exit_within = still_there
        worker.crash()
        await asyncio.sleep(0.1)
        assert not bench.supervisor.is_ready
        assert bench.supervisor.state is WorkerState.FAILED
        await bench.ready()
        await bench.supervisor.stop(0)

    run(scenario())
