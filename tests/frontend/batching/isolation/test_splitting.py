from collections.abc import Callable, Sequence
from functools import partial
from itertools import combinations
from math import ceil, log2
from typing import Any

import fakes
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marserve.backend.protocol import Prediction
from marserve.frontend.batching.batches import Reason
from marserve.frontend.batching.isolation.failure_isolation import FailureIsolation
from marserve.frontend.batching.isolation.splitting import BatchSplitting, Failure, Hint
from marserve.frontend.batching.jobs import Job
from marserve.frontend.errors import PredictionFailed, ServeError

ISOLATION, MEMORY = Reason.ISOLATION, Reason.OUT_OF_MEMORY
Failing = Callable[[list[int]], Reason | None]
Hinting = Callable[[list[int]], tuple[int, str] | None]


class Case:
    """A batch of jobs that are named by their place, and a handler that fails for some of them.

    Args:
        size: Jobs in the batch.
        failing: Says why a part with these jobs fails, if it does.
        hinting: The job that a traceback names when a part with these jobs fails, if any, and the
            line that it names.
        counts: Whether the handler counts each job, and the run, before it fails.
    """

    def __init__(
        self,
        loop: Any,
        size: int,
        failing: Failing,
        *,
        isolates: bool = True,
        hinting: Hinting = lambda _names: None,
        learnt: FailureIsolation | None = None,
        counts: bool = False,
    ) -> None:
        self.jobs = [
            fakes.AwaitedJob(fakes.make_input(id_=str(name)), 0.0, loop.create_future())
            for name in range(size)
        ]
        self.failing = failing
        self.learnt = learnt or FailureIsolation()
        self.hinting = hinting
        self.reported: list[Any] = []
        self.counts = counts
        self.splitting = BatchSplitting(size, self.learnt, self.reported.extend, isolates=isolates)
        self.parts: list[list[int]] = []

    def fail_batch(self, reason: Reason = ISOLATION) -> None:
        self._failed(self.jobs, [*range(len(self.jobs))], reason)

    def _failed(self, jobs: Sequence[Job], names: list[int], reason: Reason) -> None:
        self.learnt.rate.run_failed()
        named = self.hinting(names)
        hint = named and Hint(self.jobs[named[0]], named[1])
        failure = Failure(self.error(names), self.rows(names) if self.counts else [])
        self.splitting.failed(jobs, failure, reason, len(names), hint)

    def rows(self, names: Sequence[int]) -> list[list[Any]]:
        each = [["counter", "Seen", "Count", 1.0, [], [str(name)]] for name in names]
        return [*each, ["counter", "Runs", "Count", 1.0, [], []]]

    def error(self, names: Sequence[int]) -> ServeError:
        return PredictionFailed(",".join(map(str, names)))

    def run(self, limit: int = 1000) -> None:
        """Run parts, at most ``limit``, until there are none."""
        for _ in range(limit):
            part = self.splitting.next_part()
            if part is None:
                return
            self._run(part.jobs)

    def _run(self, jobs: Sequence[Job]) -> None:
        names = [self.jobs.index(job) for job in jobs]
        self.parts.append(names)
        reason = self.failing(names)
        if reason is not None:
            self._failed(jobs, names, reason)
            return
        self.learnt.rate.succeeded(len(jobs))
        self.splitting.succeeded()
        for job in jobs:
            assert job.is_open
            job.resolve(Prediction(b""))

    @property
    def failed(self) -> dict[int, str]:
        """The jobs that failed, and their messages; all jobs are answered."""
        assert all(job.future.done() for job in self.jobs)
        answered = [
            (name, job.future) for name, job in enumerate(self.jobs) if not job.future.cancelled()
        ]
        return {name: str(each.exception()) for name, each in answered if each.exception()}


@pytest.fixture
def make_case(loop):
    return partial(Case, loop)


def poisoned_by(*bad: int) -> Failing:
    return lambda names: ISOLATION if set(bad) & set(names) else None


def needs_memory(limit: int) -> Failing:
    return lambda names: MEMORY if len(names) > limit else None


@pytest.mark.parametrize("bad", range(32))
def test_one_bad_job_among_32_fails_alone_with_its_own_error_at_every_place(bad, make_case):
    case = make_case(32, poisoned_by(bad))
    case.fail_batch()
    case.run()
    assert case.failed == {bad: str(bad)}
    assert len(case.parts) <= 10
    assert sum(map(len, case.parts)) <= 62


@pytest.mark.parametrize("size", [2, 3, 5, 8, 12, 31, 33])
def test_two_bad_jobs_fail_alone_wherever_they_are(size, make_case):
    for bad in combinations(range(size), 2):
        case = make_case(size, poisoned_by(*bad))
        case.fail_batch()
        case.run()
        assert case.failed == {name: str(name) for name in bad}
        assert len(case.parts) <= 4 * ceil(log2(size))


def test_a_model_that_is_broken_costs_little_more_than_the_batch_did(make_case):
    case = make_case(32, lambda _names: ISOLATION)
    case.fail_batch()
    case.run()
    assert set(case.failed) == set(range(32))
    assert len(case.parts) == 20
    assert sum(map(len, case.parts)) <= 2 * 32
    for _ in range(3):
        again = make_case(32, lambda _names: ISOLATION, learnt=case.learnt)
        again.fail_batch()
        again.run()
        assert set(again.failed) == set(range(32))
    assert [len(part) for part in again.parts] == [1, 1]


def test_a_model_that_has_recovered_is_isolated_as_ever(make_case):
    learnt = FailureIsolation()
    while not learnt.rate.fails_for_all:
        learnt.rate.run_failed()
    again = make_case(32, poisoned_by(4), learnt=learnt)
    again.fail_batch()
    again.run()
    assert again.failed == {4: "4"}


@pytest.mark.parametrize("bad", [range(0, 32, 3), range(0, 32, 2), range(1, 32)])
def test_however_many_are_bad_the_others_are_answered(bad, make_case):
    case = make_case(32, poisoned_by(*bad))
    case.fail_batch()
    case.run()
    assert case.failed == {name: str(name) for name in bad}
    assert len(case.parts) <= 2 * 32 - 2


def named_first(*bad: int, line: str = "handler.py:3 ValueError") -> Hinting:
    """The traceback of a loop over the rows: it names the first bad one."""
    return lambda names: next(((name, line) for name in names if name in bad), None)


def test_a_job_that_is_named_runs_alone_and_the_others_together(make_case):
    case = make_case(8, poisoned_by(5), hinting=named_first(5))
    case.fail_batch()
    case.run()
    assert case.parts == [[0, 1, 2, 3, 4, 6, 7], [5]]
    assert case.failed == {5: "5"}


def test_each_job_that_is_named_costs_two_runs(make_case):
    case = make_case(32, poisoned_by(1, 9, 31), hinting=named_first(1, 9, 31))
    case.fail_batch()
    case.run()
    assert len(case.parts) == 6
    assert case.failed == {1: "1", 9: "9", 31: "31"}


def test_a_hint_is_no_verdict_and_a_wrong_one_is_not_followed_again(make_case):
    learnt = FailureIsolation()

    def last_row(names):
        return names[-1], "handler.py:9 ValueError"

    for _ in range(9):
        case = make_case(8, poisoned_by(3), hinting=last_row, learnt=learnt)
        case.fail_batch()
        case.run()
        assert case.failed == {3: "3"}
    assert [7] not in case.parts
    assert len(case.parts) <= 6


def test_a_line_that_always_names_the_cause_is_believed_but_checked_now_and_then(make_case):
    learnt = FailureIsolation()
    runs = []
    for _ in range(80):
        case = make_case(8, poisoned_by(5), hinting=named_first(5), learnt=learnt)
        case.fail_batch()
        case.run()
        assert list(case.failed) == [5]
        runs.append(len(case.parts))
    assert set(runs[:16]) == {2}
    assert runs[16:].count(2) == 8
    assert runs[16:].count(1) == 56


def test_what_the_handler_counted_of_a_job_that_is_named_is_counted_once(make_case):
    learnt = FailureIsolation()
    for _ in range(40):
        case = make_case(8, poisoned_by(5), hinting=named_first(5), learnt=learnt, counts=True)
        case.fail_batch()
        case.run()
        assert case.reported == case.rows([5])


def test_no_line_is_believed_while_most_requests_fail(make_case):
    """The last row is mostly bad, by chance; a good one in its place runs alone."""
    learnt = FailureIsolation()
    for bad in [*[{5, 6, 7}] * 40, *[{0, 1, 2}] * 8]:
        for _ in range(100):
            learnt.rate.request_failed()
        case = make_case(
            8,
            lambda names, bad=bad: ISOLATION if bad.intersection(names) else None,
            hinting=lambda names: (names[-1], "handler.py:5 ValueError"),
            learnt=learnt,
        )
        case.fail_batch()
        case.run()
        assert {*case.failed} == bad


def test_a_line_that_raises_because_of_others_is_never_believed(make_case):
    """A client sends rows that do not match the first one, and the loop names the others."""
    learnt = FailureIsolation()
    for _ in range(80):
        case = make_case(
            8,
            lambda names: ISOLATION if 0 in names and len(names) > 1 else None,
            hinting=lambda names: (names[1], "handler.py:5 ValueError"),
            learnt=learnt,
        )
        case.fail_batch()
        case.run()
        assert case.failed == {}


def test_a_half_whose_other_half_succeeded_is_not_run_as_a_whole(make_case):
    case = make_case(8, poisoned_by(7))
    case.fail_batch()
    case.run()
    assert case.parts == [[0, 1, 2, 3], [4, 5], [6], [7]]


def test_a_batch_whose_members_only_fail_together_is_answered_in_parts(make_case):
    case = make_case(8, lambda names: ISOLATION if {3, 4} <= set(names) else None)
    case.fail_batch()
    case.run()
    assert case.failed == {}
    assert case.parts == [[0, 1, 2, 3], [4, 5], [6], [7]]


def test_where_isolation_is_not_wanted_all_get_the_error_of_the_batch(make_case):
    case = make_case(3, poisoned_by(0), isolates=False)
    case.fail_batch()
    case.run()
    assert case.failed == dict.fromkeys(range(3), "0,1,2")
    assert case.parts == []


def test_whoever_left_is_left_out(make_case):
    case = make_case(8, poisoned_by(7))
    case.fail_batch()
    for name in (0, 2, 4, 5, 6):
        case.jobs[name].cancel()
    case.run()
    assert case.parts == [[1, 3], [7]]


def test_an_answer_that_has_begun_is_broken_off_and_the_others_run_again(make_case):
    case = make_case(3, poisoned_by(0))
    case.jobs[1].push(Prediction(b"piece"))
    case.fail_batch()
    assert case.jobs[1].stream is not None
    assert not case.jobs[1].is_open
    case.run()
    assert case.parts == [[0], [2]]
    assert case.failed == {0: "0"}


def test_when_all_but_one_have_begun_that_one_runs_by_itself(make_case):
    case = make_case(2, poisoned_by())
    case.jobs[0].push(Prediction(b"piece"))
    case.fail_batch()
    case.run()
    assert case.parts == [[1]]
    assert case.failed == {}


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 7, 16, 31])
def test_what_does_not_fit_into_memory_is_halved_until_it_does(limit, make_case):
    case = make_case(32, needs_memory(limit), isolates=False)
    case.fail_batch(MEMORY)
    case.run()
    assert case.failed == {}
    assert len(case.parts) <= 2 * 32 - 2
    fits = max(len(part) for part in case.parts if len(part) <= limit)
    assert case.splitting.too_large == 2 * fits


def test_a_single_job_that_needs_too_much_memory_is_to_blame_not_the_size(make_case):
    case = make_case(32, lambda names: MEMORY if 9 in names else None, isolates=False)
    case.fail_batch(MEMORY)
    case.run()
    assert case.failed == {9: "9"}
    assert case.splitting.too_large == 0


def test_where_less_does_not_help_memory_is_not_what_is_wanting(make_case):
    case = make_case(32, lambda _names: MEMORY)
    case.fail_batch(MEMORY)
    case.run()
    assert set(case.failed) == set(range(32))
    assert len(case.parts) == 10
    assert case.splitting.too_large == 0


def test_where_nothing_was_run_again_memory_may_not_be_what_was_wanting(make_case):
    case = make_case(4, needs_memory(2))
    case.fail_batch(MEMORY)
    for job in case.jobs:
        job.cancel()
    case.run()
    assert case.parts == []
    assert case.splitting.too_large == 0


def test_a_bad_job_in_a_batch_too_large_for_memory_is_found(make_case):
    def failing(names):
        if len(names) > 4:
            return MEMORY
        return ISOLATION if 2 in names else None

    case = make_case(16, failing)
    case.fail_batch(MEMORY)
    case.run()
    assert case.failed == {2: "2"}
    assert case.splitting.too_large == 8


@pytest.mark.parametrize(
    ("fails", "size"),
    [
        (lambda names: ISOLATION if len(names) > 2 else None, 4),
        (lambda names: ISOLATION if len(names) > 1 else None, 2),
        (lambda names: ISOLATION if len(names) > 2 or 5 in names else None, 0),
        (lambda _names: ISOLATION, 0),
        (needs_memory(2), 0),
    ],
)
def test_the_size_is_to_blame_where_no_job_fails_alone(make_case, fails, size):
    case = make_case(8, fails)
    case.fail_batch(fails([*range(8)]) or ISOLATION)
    case.run()
    assert case.splitting.fails_together == size


def test_those_that_wait_can_be_named(make_case):
    case = make_case(4, poisoned_by(0))
    case.fail_batch()
    case.run(limit=1)
    case.run(limit=1)
    waiting = {case.jobs.index(job) for job in case.splitting.waiting}
    assert case.parts == [[0, 1], [0]]
    assert waiting == {1, 2, 3}


@given(
    st.integers(2, 40),
    st.integers(1, 40),
    st.sets(st.integers(0, 39)),
    st.sets(st.integers(0, 39)),
    st.sampled_from([ISOLATION, MEMORY]),
    st.booleans(),
)
def test_everybody_is_answered_once_within_the_bounds_whatever_fails(
    size, fits, bad, gone, first, isolates
):
    def failing(names):
        return MEMORY if len(names) > fits else ISOLATION if bad & set(names) else None

    loop = fakes.VirtualLoop()
    try:
        case = Case(loop, size, failing, isolates=isolates, counts=True)
        for name in gone & set(range(size)):
            case.jobs[name].cancel()
        case.fail_batch(first)
        case.run()
        assert all(job.future.done() for job in case.jobs)
        assert len(case.parts) <= 2 * size - 2
        assert not gone & {name for part in case.parts for name in part}
        ran = [len(part) for part in case.parts]
        assert not ran or max(ran) <= ceil(size / 2)
        counted = [int(row[5][0]) for row in case.reported if row[5]]
        assert sorted(name for name in counted if name not in gone) == sorted(case.failed)
    finally:
        loop.close()
