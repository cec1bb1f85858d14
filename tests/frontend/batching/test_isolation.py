from collections.abc import Callable, Sequence
from functools import partial
from itertools import combinations
from math import ceil, log2
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marserve.backend.protocol import Prediction
from marserve.frontend.batching.batches import Reason
from marserve.frontend.batching.isolation import BatchSplitting, RetryBudget
from marserve.frontend.batching.jobs import Job
from marserve.frontend.errors import PredictionFailed, ServeError

ISOLATION, MEMORY = Reason.ISOLATION, Reason.OUT_OF_MEMORY
Failing = Callable[[list[int]], Reason | None]


class Case:
    """A batch of jobs that are named by their place, and a handler that fails for some of them.

    Args:
        size: Jobs in the batch.
        failing: Says why a part with these jobs fails, if it does.
    """

    def __init__(
        self, fakes: ModuleType, loop: Any, size: int, failing: Failing, *, isolates: bool = True
    ) -> None:
        self.jobs = [
            fakes.AwaitedJob(fakes.make_input(), 0.0, loop.create_future()) for _ in range(size)
        ]
        self.failing = failing
        self.splitting = BatchSplitting(size, isolates=isolates)
        self.parts: list[list[int]] = []

    def fail_batch(self, reason: Reason = ISOLATION) -> None:
        everybody = range(len(self.jobs))
        self.splitting.failed(self.jobs, self.error(everybody), reason, len(self.jobs))

    def error(self, names: Sequence[int]) -> ServeError:
        return PredictionFailed(",".join(map(str, names)))

    def run(self, limit: int = 1000) -> None:
        """Run parts, so many at most, until there are none."""
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
            self.splitting.failed(jobs, self.error(names), reason, len(names))
            return
        self.splitting.succeeded()
        for job in jobs:
            assert job.is_open
            job.resolve(Prediction(b""))

    @property
    def failed(self) -> dict[int, str]:
        """Jobs that failed, and the message they got; everybody has been answered."""
        assert all(job.future.done() for job in self.jobs)
        errors = [job.future.exception() for job in self.jobs]
        return {name: str(error) for name, error in enumerate(errors) if error is not None}


MakeCase = Callable[..., Case]


@pytest.fixture
def make_case(fakes: ModuleType, loop: Any) -> Callable[..., Case]:
    return partial(Case, fakes, loop)


def poisoned_by(*bad: int) -> Failing:
    return lambda names: ISOLATION if set(bad) & set(names) else None


def needs_memory(limit: int) -> Failing:
    return lambda names: MEMORY if len(names) > limit else None


@pytest.mark.parametrize("bad", range(32))
def test_one_bad_job_among_32_fails_alone_with_its_own_error_at_every_place(
    bad: int, make_case: MakeCase
) -> None:
    case = make_case(32, poisoned_by(bad))
    case.fail_batch()
    case.run()
    assert case.failed == {bad: str(bad)}
    assert len(case.parts) == 10
    assert sum(map(len, case.parts)) == 62


@pytest.mark.parametrize("size", [2, 3, 5, 8, 12, 31, 33])
def test_two_bad_jobs_fail_alone_wherever_they_are(size: int, make_case: MakeCase) -> None:
    for bad in combinations(range(size), 2):
        case = make_case(size, poisoned_by(*bad))
        case.fail_batch()
        case.run()
        assert case.failed == {name: str(name) for name in bad}
        assert len(case.parts) <= 4 * ceil(log2(size))


def test_a_model_that_is_broken_costs_little_more_than_the_batch_did(
    make_case: MakeCase,
) -> None:
    case = make_case(32, lambda _names: ISOLATION)
    case.fail_batch()
    case.run()
    assert set(case.failed) == set(range(32))
    assert len(case.parts) == 10
    assert sum(map(len, case.parts)) < 1.3 * 32


def test_many_bad_jobs_end_it_at_the_bound_and_the_rest_gets_the_error_it_was_part_of(
    make_case: MakeCase,
) -> None:
    bad = range(0, 32, 3)
    case = make_case(32, poisoned_by(*bad))
    case.fail_batch()
    case.run()
    assert len(case.parts) == 20
    assert set(bad) <= set(case.failed)
    for name, error in case.failed.items():
        assert str(name) in error.split(",")


def test_a_batch_whose_members_only_fail_together_is_answered_in_parts(
    make_case: MakeCase,
) -> None:
    case = make_case(8, lambda names: ISOLATION if {3, 4} <= set(names) else None)
    case.fail_batch()
    case.run()
    assert case.failed == {}
    assert case.parts == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_where_isolation_is_not_wanted_all_get_the_error_of_the_batch(
    make_case: MakeCase,
) -> None:
    case = make_case(3, poisoned_by(0), isolates=False)
    case.fail_batch()
    case.run()
    assert case.failed == dict.fromkeys(range(3), "0,1,2")
    assert case.parts == []


def test_whoever_left_is_left_out(make_case: MakeCase) -> None:
    case = make_case(8, poisoned_by(7))
    case.fail_batch()
    for name in (0, 2, 4, 5, 6):
        case.jobs[name].cancel()
    case.run()
    assert case.parts == [[1, 3], [7]]


def test_an_answer_that_has_begun_is_broken_off_and_the_others_run_again(
    make_case: MakeCase,
) -> None:
    case = make_case(3, poisoned_by(0))
    case.jobs[1].push(Prediction(b"piece"))
    case.fail_batch()
    assert case.jobs[1].stream is not None
    assert not case.jobs[1].is_open
    case.run()
    assert case.parts == [[0], [2]]
    assert case.failed == {0: "0"}


def test_when_all_but_one_have_begun_that_one_runs_by_itself(
    make_case: MakeCase,
) -> None:
    case = make_case(2, poisoned_by())
    case.jobs[0].push(Prediction(b"piece"))
    case.fail_batch()
    case.run()
    assert case.parts == [[1]]
    assert case.failed == {}


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 7, 16, 31])
def test_what_does_not_fit_into_memory_is_halved_until_it_does(
    limit: int, make_case: MakeCase
) -> None:
    case = make_case(32, needs_memory(limit), isolates=False)
    case.fail_batch(MEMORY)
    case.run()
    assert case.failed == {}
    assert len(case.parts) <= 2 * 32 - 2
    fits = max(len(part) for part in case.parts if len(part) <= limit)
    assert case.splitting.too_large == 2 * fits


def test_a_single_job_that_needs_too_much_memory_is_to_blame_not_the_size(
    make_case: MakeCase,
) -> None:
    case = make_case(32, lambda names: MEMORY if 9 in names else None, isolates=False)
    case.fail_batch(MEMORY)
    case.run()
    assert case.failed == {9: "9"}
    assert case.splitting.too_large == 0


def test_where_less_does_not_help_memory_is_not_what_is_wanting(
    make_case: MakeCase,
) -> None:
    case = make_case(32, lambda _names: MEMORY)
    case.fail_batch(MEMORY)
    case.run()
    assert set(case.failed) == set(range(32))
    assert len(case.parts) == 10
    assert case.splitting.too_large == 0


def test_where_nothing_was_run_again_memory_may_not_be_what_was_wanting(
    make_case: MakeCase,
) -> None:
    case = make_case(4, needs_memory(2))
    case.fail_batch(MEMORY)
    for job in case.jobs:
        job.cancel()
    case.run()
    assert case.parts == []
    assert case.splitting.too_large == 0


def test_a_bad_job_in_a_batch_too_large_for_memory_is_found(make_case: MakeCase) -> None:
    def failing(names: list[int]) -> Reason | None:
        if len(names) > 4:
            return MEMORY
        return ISOLATION if 2 in names else None

    case = make_case(16, failing)
    case.fail_batch(MEMORY)
    case.run()
    assert case.failed == {2: "2"}
    assert case.splitting.too_large == 8


def test_those_that_wait_can_be_named(make_case: MakeCase) -> None:
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
    fakes: ModuleType,
    size: int,
    fits: int,
    bad: set[int],
    gone: set[int],
    first: Reason,
    isolates: bool,
) -> None:
    def failing(names: list[int]) -> Reason | None:
        return MEMORY if len(names) > fits else ISOLATION if bad & set(names) else None

    loop = fakes.VirtualLoop()
    try:
        case = Case(fakes, loop, size, failing, isolates=isolates)
        for name in gone & set(range(size)):
            case.jobs[name].cancel()
        case.fail_batch(first)
        case.run()
        assert all(job.future.done() for job in case.jobs)
        assert len(case.parts) <= 2 * size - 2
        assert not gone & {name for part in case.parts for name in part}
        ran = [len(part) for part in case.parts]
        assert not ran or max(ran) <= ceil(size / 2)
    finally:
        loop.close()


@pytest.fixture
def spent() -> RetryBudget:
    """A budget whose first credit is gone."""
    budget = RetryBudget()
    while budget.has_credit:
        budget.spend(0.25)
    return budget


def test_there_is_some_credit_before_anything_has_run() -> None:
    assert RetryBudget().has_credit


def test_a_tenth_of_the_time_may_be_spent(spent: RetryBudget) -> None:
    run_time = isolating = 0.0
    for _ in range(10_000):
        run_time += 0.2
        spent.earn(0.2)
        if spent.has_credit:
            isolating += 0.3
            spent.spend(0.3)
    assert isolating == pytest.approx(0.1 * run_time, rel=0.01)


def test_a_debt_has_to_be_earned_back(spent: RetryBudget) -> None:
    spent.spend(10.0)
    spent.earn(99.0)
    assert not spent.has_credit
    spent.earn(2.0)
    assert spent.has_credit


def test_credit_is_not_saved_up_without_end() -> None:
    budget = RetryBudget()
    budget.earn(1e6)
    budget.spend(30.0)
    assert not budget.has_credit
