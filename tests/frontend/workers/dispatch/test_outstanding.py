import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import Any

import fakes
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marserve.backend.framing import encode
from marserve.backend.protocol import Load, Loaded, NextBatch, Predict, Prediction, Reply
from marserve.frontend.workers.dispatch.outstanding import OutstandingBatches, dispatch_batches

STAGES = (1.0, 1.0, 1.0)
DIED = "Worker died. Its process was killed by SIGSEGV."


async def through(
    stages: Sequence[asyncio.Lock],
    seconds: Sequence[float],
    fates: Mapping[str, str],
    batch: Predict,
) -> AsyncIterator[Any]:
    """A batch on its way: it waits in the hands of a stage until the next one has room."""
    ids = [input_.id for input_ in batch.inputs]
    for number, stage in enumerate(stages):
        await stage.acquire()
        if number:
            stages[number - 1].release()
        else:
            yield NextBatch()
        await asyncio.sleep(seconds[number])
        if f"kills-{number}" in map(fates.get, ids):
            yield "die"
    stages[-1].release()
    if "raises" in map(fates.get, ids):
        yield Reply(503, "bad: " + ",".join(ids))
    else:
        yield Reply(predictions=[Prediction(id_.encode()) for id_ in ids])


class StagedWorker(fakes.FakeWorker):
    """A worker whose stages overlap, each stage for so long, as `backend.pipeline` does it.

    A fate is ``raises``, or ``kills-0`` to ``kills-2``: the stage at whose end the worker dies.
    """

    def __init__(self, seconds, fates, *args):
        super().__init__(*args)
        self.seconds, self.fates = seconds, fates
        self.stages = [asyncio.Lock() for _ in seconds]
        self.tasks = []
        self.max_under_way = self.under_way = 0

    async def _obey(self, message, writer):
        if isinstance(message, Load):
            await super()._obey(message, writer)
            return
        self.batches.append([input_.id for input_ in message.inputs])
        self.under_way += 1
        self.max_under_way = max(self.max_under_way, self.under_way)
        self.tasks.append(asyncio.ensure_future(self._pass_on(message, writer)))

    async def _pass_on(self, message, writer):
        async for reply in through(self.stages, self.seconds, self.fates, message):
            if reply == "die":
                self.crash()
                return
            reply.number = message.number
            writer.write(b"".join(encode(reply)))
        self.under_way -= 1

    def crash(self):
        super().crash()
        for task in self.tasks:
            if task is not asyncio.current_task():
                task.cancel()

    async def stop(self, grace, *close):
        self.crash()
        return int(await super().stop(grace, *close))


@pytest.fixture
def overlapping(served, monkeypatch):
    """Queues served by a worker whose stages overlap."""

    def make(seconds=STAGES, **options):
        fates = options.pop("fates", {})
        monkeypatch.setattr(fakes, "FakeWorker", partial(StagedWorker, seconds, fates))
        way = partial(
            dispatch_batches,
            timeout=options.pop("timeout", 60.0),
            outstanding=options.pop("outstanding", None),
        )
        return served(way, **{"size": 1, "load": Loaded(overlaps=1), **options})

    return make


async def ends(*jobs: Any) -> list[str]:
    """The answers, or the messages of the failures, and a bang."""
    found = await asyncio.gather(*[job.future for job in jobs], return_exceptions=True)
    return [
        f"{end}!" if isinstance(end, BaseException) else bytes(end.body).decode() for end in found
    ]


@pytest.mark.parametrize(
    ("outstanding", "seconds_each"), [(None, 1.0), (4, 1.0), (16, 1.0), (3, 1.0), (1, 3.0)]
)
def test_the_slowest_stage_sets_the_pace(outstanding, seconds_each, run, loop, overlapping):
    async def scenario():
        async with overlapping(outstanding=outstanding) as put:
            began = loop.time()
            jobs = [put(str(n)) for n in range(10)]
            assert await ends(*jobs) == [str(n) for n in range(10)]
            assert loop.time() - began == pytest.approx(3.0 + 9 * seconds_each)

    run(scenario())


@pytest.mark.parametrize(("outstanding", "expected"), [(None, 4), (2, 2), (4, 4), (6, 6)])
def test_so_many_batches_are_outstanding_and_no_more(outstanding, expected, run, overlapping):
    async def scenario():
        async with overlapping(outstanding=outstanding) as put:
            await ends(*[put(str(n)) for n in range(12)])
            assert put.workers[0].max_under_way == expected

    run(scenario())


def test_who_cannot_be_begun_with_waits_in_the_queue_for_company(run, overlapping):
    async def scenario():
        async with overlapping((0.1, 1.0, 0.1), size=8) as put:
            jobs = []
            for n in range(20):
                jobs.append(put(str(n)))
                await asyncio.sleep(0.2)
            await ends(*jobs)
            sizes = [len(batch) for batch in put.batches]
            assert sizes[:3] == [1, 1, 1]
            assert min(sizes[4:-1]) >= 4

    run(scenario())


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_request_that_kills_its_worker_dies_of_the_second_and_takes_nobody_along(
    stage, run, overlapping
):
    async def scenario():
        async with overlapping(fates={"2": f"kills-{stage}"}) as put:
            jobs = [put(str(n)) for n in range(6)]
            assert await ends(*jobs) == ["0", "1", f"{DIED}!", "3", "4", "5"]
            assert len(put.workers) == 3

    run(scenario())


def test_behind_a_request_that_was_in_a_crash_nothing_is_sent(run, overlapping):
    async def scenario():
        async with overlapping() as put:
            jobs = [put(str(n)) for n in range(6)]
            await asyncio.sleep(2.5)
            put.workers[0].crash()
            assert await ends(*jobs) == [str(n) for n in range(6)]
            assert put.workers[1].batches == [[str(n)] for n in range(6)]
            assert put.workers[1].max_under_way == 2  # those that had not left the queue

    run(scenario())


def test_a_failed_batch_is_split_while_others_go_on(run, overlapping):
    async def scenario():
        async with overlapping(size=4, fates={"5": "raises"}, batching={"delay": 0.5}) as put:
            jobs = [put(str(n)) for n in range(12)]
            answers = [str(n) for n in range(12)]
            answers[5] = "bad: 5!"
            assert await ends(*jobs) == answers
            assert put.batches[:3] == [list("0123"), list("4567"), ["8", "9", "10", "11"]]
            assert put.counted("marserve_failed_batches_total") == 3

    run(scenario())


def test_a_worker_that_is_stopped_answers_all_of_them_and_takes_no_more(run, overlapping):
    async def scenario():
        async with overlapping() as put:
            jobs = [put(str(n)) for n in range(6)]
            await asyncio.sleep(2.5)
            await put.stop(60.0)
            assert [job.future.done() for job in jobs] == [True] * 4 + [False] * 2

    run(scenario())


def test_silence_counts_from_the_last_word_of_the_worker(run, loop, overlapping):
    """Each stage takes less than the timeout, all that is outstanding takes more."""

    async def scenario():
        async with overlapping((20.0, 20.0, 20.0), timeout=30.0) as put:
            assert await ends(*[put(str(n)) for n in range(4)]) == list("0123")
        async with overlapping((20.0, 40.0, 20.0), timeout=30.0) as put:
            began = loop.time()
            assert await ends(put("slow")) == [
                "Worker died. Timeout: no answer within responseTimeout (30 s).!"
            ]
            assert loop.time() - began == pytest.approx(30.0, abs=1.0)

    run(scenario())


FATES = st.lists(
    st.sampled_from(["good", "good", "good", "raises", "kills-0", "kills-1", "kills-2", "leaves"]),
    min_size=1,
    max_size=20,
)


@settings(max_examples=60)
@given(
    FATES,
    st.integers(1, 8),
    st.integers(2, 8),
    st.lists(st.floats(0.1, 2), min_size=3, max_size=3),
    st.integers(1, 3),
)
def test_everybody_is_answered_once_and_only_the_guilty_fail(
    served, fates, size, outstanding, seconds, overlaps
):
    fate_of = {str(place): fate for place, fate in enumerate(fates)}
    kills = [id_ for id_, fate in fate_of.items() if fate.startswith("kills")]

    async def scenario():
        way = partial(OutstandingBatches, timeout=60.0, limit=outstanding)
        async with served(way, size=size, load=Loaded(overlaps=overlaps)) as put:
            jobs = {id_: put(id_) for id_ in fate_of}
            await asyncio.sleep(0.05)
            for id_, fate in fate_of.items():
                if fate == "leaves":
                    jobs[id_].cancel()
            staying = [job.future for id_, job in jobs.items() if fate_of[id_] != "leaves"]
            await asyncio.gather(*staying, return_exceptions=True)
            for id_, job in jobs.items():
                if fate_of[id_] == "good" and len(kills) <= 1 and fates.count("raises") <= 1:
                    assert bytes(job.future.result().body) == id_.encode()
                if fate_of[id_] == "raises" or id_ in kills:
                    assert job.future.exception() is not None

    loop = fakes.VirtualLoop()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.monotonic", loop.time)
        patch.setattr(fakes, "FakeWorker", partial(StagedWorker, seconds, fate_of))
        try:
            loop.run(scenario())
        finally:
            loop.close()


@pytest.mark.parametrize(
    ("overlaps", "outstanding", "count"),
    [(0, None, 1), (0, 1, 1), (1, 1, 1), (1, None, 5), (4, None, 7), (0, 3, 3), (1, 6, 6)],
)
def test_how_many_are_outstanding_where_nobody_says(overlaps, outstanding, count, run, served):
    made = []

    def way(*args, **kwargs):
        limits = {"timeout": 60.0}
        made.append(dispatch_batches(*args, **limits, **kwargs, outstanding=outstanding, devices=2))
        return made[-1]

    async def scenario():
        async with served(way, load=Loaded(overlaps=overlaps)):
            [dispatch] = made
            assert getattr(dispatch, "limit", 1) == count

    run(scenario())
