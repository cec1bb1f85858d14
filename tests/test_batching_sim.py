"""The simulator's own parts: what it says of the policies is worth as much as they are right."""

import importlib
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.simulation

_FOLDER = Path(__file__).resolve().parent.parent / "benchmarks" / "batching_sim"
_MODULES = (
    "profiles",
    "workloads",
    "virtual_time",
    "clients",
    "outcome",
    "optimum",
    "baselines",
    "engine",
    "contenders",
    "grid",
    "groups",
    "scenarios",
    "report",
    "group_report",
    "length_bound",
    "by_length",
    "replicas",
    "closed_loops",
    "impatient",
)


@pytest.fixture(scope="module")
def sim():
    """The simulator's modules: a program's, so its folder is on the path only while they load."""
    sys.path.insert(0, str(_FOLDER))
    try:
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in _MODULES})
    finally:
        sys.path.remove(str(_FOLDER))
        for name in _MODULES:
            sys.modules.pop(name)


# -- the optimum -----------------------------------------------------------------------------------


def _best_by_force(
    arrivals: Sequence[float],
    goal: float,
    cost: Callable[[int], float],
    size: int,
    workers: int = 1,
    pause: tuple[float, float] = (0.0, 0.0),
) -> int:
    """Tries every subset as the next batch, also those that are no run of neighbours."""

    def best(free: tuple[float, ...], left: frozenset[int]) -> int:
        largest = 0
        for bits in product((False, True), repeat=len(left)):
            batch = [item for item, chosen in zip(sorted(left), bits, strict=True) if chosen]
            if 0 < len(batch) <= size:
                end = _end(max(free[0], arrivals[batch[-1]]), cost(len(batch)), pause)
                if end <= arrivals[batch[0]] + goal + 1e-12:
                    others = tuple(sorted((end, *free[1:])))
                    largest = max(largest, len(batch) + best(others, left - set(batch)))
        return largest

    return best((0.0,) * workers, frozenset(range(len(arrivals))))


def _end(start: float, work: float, pause: tuple[float, float]) -> float:
    """When some work is done that stands still in a pause."""
    begins, ends = pause
    if begins <= start < ends:
        return ends + work
    return start + work + (ends - begins) * (start < begins < start + work)


@given(
    gaps=st.lists(st.integers(0, 6), min_size=1, max_size=6),
    goal=st.integers(2, 14),
    costs=st.lists(st.integers(1, 9), min_size=1, max_size=4).map(sorted),
    pause=st.tuples(st.integers(0, 8), st.integers(0, 9)),
)
def test_the_optimum_is_that_of_brute_force(sim, gaps, goal, costs, pause):
    """For costs that rise in any way, and a pause."""
    arrivals = np.cumsum(gaps).astype(float)
    start, seconds = pause

    def cost(count):
        return float(costs[count - 1])

    pauses = [sim.profiles.Pause(start, seconds)]
    found = sim.optimum.most_in_time(arrivals, goal, cost, len(costs), pauses=pauses)
    times = float(start), float(start + seconds)
    assert found == _best_by_force(arrivals.tolist(), goal, cost, len(costs), pause=times)


@given(
    gaps=st.lists(st.integers(0, 4), min_size=1, max_size=5),
    goal=st.integers(2, 14),
    costs=st.lists(st.integers(1, 9), min_size=1, max_size=3).map(sorted),
    workers=st.integers(1, 3),
)
def test_nobody_can_beat_the_bound_for_several_workers(sim, gaps, goal, costs, workers):
    arrivals = np.cumsum(gaps).astype(float)

    def cost(count):
        return float(costs[count - 1])

    bound = sim.optimum.fluid_bound(arrivals, goal, cost, len(costs), workers)
    assert bound >= _best_by_force(arrivals.tolist(), goal, cost, len(costs), workers)


def test_the_optimum_is_the_same_when_a_bound_of_its_losses_is_known(sim):
    arrivals = sim.workloads.poisson(30.0, 200, 1)
    args = (arrivals, 0.3, lambda count: 0.1 + 0.02 * count, 4)
    found = sim.optimum.most_in_time(*args)
    assert 0 < found < 200
    assert sim.optimum.most_in_time(*args, most_lost=200 - found) == found
    with pytest.raises(ValueError, match="no schedule"):
        sim.optimum.most_in_time(*args, most_lost=200 - found - 1)


# -- workloads -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        *("Poisson", "MMPP 3", "MMPP 10", "gamma CV 0.5", "gamma CV 1", "gamma CV 4"),
        *("trace-like", "flash crowds", "on/off", "generated trace"),
    ],
)
def test_workloads_keep_the_rate_and_repeat_themselves(sim, name):
    workload = sim.workloads.WORKLOADS[name]
    first, again, other = (workload(200.0, 4000, seed) for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert np.all(np.diff(first) >= 0)
    assert 4000 / first[-1] == pytest.approx(200.0, rel=0.25 if name == "gamma CV 4" else 0.1)


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("Poisson", 0, 0.01),
        ("MMPP 10", 0.3, 0.7),
        ("flash crowds", 0.6, 0.8),
        ("on/off", 0.05, 0.4),
    ],
)
def test_bursts_are_bursts(sim, name, least, most):
    arrivals = sim.workloads.WORKLOADS[name](200.0, 8000, 3)
    per_window, _ = np.histogram(arrivals, np.arange(0.0, arrivals[-1], 0.05))
    crowded = per_window[per_window > 2.5 * 200.0 * 0.05].sum() / 8000
    assert least <= crowded <= most


def test_a_load_step_has_its_rates(sim):
    arrivals = sim.workloads.steps((100.0, 1000.0, 100.0), (2.0, 1.0, 2.0), seed=1)
    counts, _ = np.histogram(arrivals, [0.0, 2.0, 3.0, 5.0])
    assert counts == pytest.approx([200, 1000, 200], rel=0.2)


# -- the engine ------------------------------------------------------------------------------------


def _run(sim: SimpleNamespace, contender: Any, arrivals: Sequence[float], **options: Any) -> Any:
    service = sim.profiles.Service(sim.profiles.GPU, **options)
    simulation = sim.engine.Simulation(contender, service)
    clients = sim.clients.OpenLoop(simulation.loop, sim.profiles.GPU.goal, np.array(arrivals))
    return simulation.run(clients)


def test_timers_ring_in_order_unless_cancelled(sim):
    loop, rung = sim.virtual_time.VirtualLoop(), []
    for delay, name in ((2.0, "late"), (1.0, "a"), (1.0, "b")):
        loop.call_later(delay, rung.append, name)
    loop.call_later(1.0, rung.append, "never").cancel()
    loop.run()
    assert rung == ["a", "b", "late"]
    assert loop.time() == 2.0


def test_a_lone_request_takes_what_its_batch_costs(sim):
    for contender in (sim.contenders.TAKE_ALL, sim.contenders.ADAPTIVE, sim.contenders.CORK):
        outcome = _run(sim, contender, [1.0])
        assert outcome.latency == pytest.approx([sim.profiles.GPU.cost(1)])
        assert outcome.good.tolist() == [True]


def test_whoever_comes_while_a_batch_runs_is_in_the_next(sim):
    cost = sim.profiles.GPU.cost
    outcome = _run(sim, sim.contenders.TAKE_ALL, [0.0, 0.001, 0.002])
    assert outcome.sizes.tolist() == [1, 2]
    ends = cost(1), cost(1) + cost(2), cost(1) + cost(2)
    assert outcome.arrived + outcome.latency == pytest.approx(ends)


@pytest.mark.parametrize("name", ["TorchServe's window", "BentoML's cork", "adaptive"])
def test_every_request_has_one_fate_and_the_same_each_time(sim, name):
    contender = next(item for item in sim.contenders.CONTENDERS if item.name == name)
    arrivals = sim.workloads.bursty(3)(1.5 * sim.profiles.GPU.capacity(), 600, 1)
    first, again = (_run(sim, contender, arrivals, noise=0.15, seed=4) for _ in range(2))
    assert np.array_equal(first.latency, again.latency, equal_nan=True)
    fates = np.isfinite(first.latency).astype(int) + first.refused + first.shed
    assert len(fates) == 600
    assert np.all(fates == 1)
    assert first.sizes.sum() == np.isfinite(first.latency).sum()
    assert first.goodput < 1.0


@pytest.mark.parametrize("clients", [1, 4])
def test_clients_of_a_closed_loop_wait_for_their_answers(sim, clients):
    simulation = sim.engine.Simulation(
        sim.contenders.TAKE_ALL, sim.profiles.Service(sim.profiles.GPU)
    )
    outcome = simulation.run(sim.clients.ClosedLoop(simulation.loop, 0.05, clients, 50))
    assert len(outcome.arrived) == 50
    ends = outcome.arrived + outcome.latency
    for begun in outcome.arrived:
        assert np.sum((outcome.arrived <= begun) & (ends > begun)) <= clients


def test_the_next_request_of_a_distant_client_comes_after_its_way(sim):
    simulation = sim.engine.Simulation(
        sim.contenders.TAKE_ALL, sim.profiles.Service(sim.profiles.GPU)
    )
    outcome = simulation.run(sim.clients.ClosedLoop(simulation.loop, 0.05, 1, 50, away=0.010))
    ways = outcome.arrived[1:] - (outcome.arrived + outcome.latency)[:-1]
    assert 0.009 <= ways.min() < ways.max() <= 0.011


def test_the_jobs_of_a_dead_worker_are_answered_by_others(sim):
    case = sim.grid.Case("gpu", "Poisson", 0.5, workers=2, outage=5.0, requests=600)
    for contender in (sim.contenders.TAKE_ALL, sim.contenders.ADAPTIVE):
        outcome = case.outcome(contender, 1)
        assert len(outcome.arrived) == 600
        assert (np.isfinite(outcome.latency) ^ (outcome.refused | outcome.shed)).all()
        assert outcome.turned_away < 0.2


def test_a_client_is_no_more_patient_than_it_says(sim):
    good, of = sim.impatient.run(sim.contenders.ADAPTIVE, sim.profiles.GPU, 1.5, 1, 2000)
    assert len(good) == len(of) == 2000
    patient, impatient = good[of >= 25].mean(), good[of < 25].mean()
    assert impatient < patient
    streaks = {"11": 0, "110": 1, "1001": 2, "00100": 2}
    for text, longest in streaks.items():
        assert sim.impatient.longest_streak(np.array([*text]) == "1") == longest


def test_slowdowns_pass_and_noise_has_the_mean_of_the_profile(sim):
    profile = sim.profiles.GPU
    slow = sim.profiles.Service(profile, slowdowns=[sim.profiles.Slowdown(5.0, 2.0, 1.0)])
    factors = [slow.seconds(4, moment) / profile.cost(4) for moment in (4.9, 5.0, 5.9, 6.0)]
    assert factors == [1.0, 2.0, 2.0, 1.0]
    noisy = sim.profiles.Service(profile, noise=0.15, seed=1)
    samples = [noisy.seconds(8) / profile.cost(8) for _ in range(4000)]
    assert np.mean(samples) == pytest.approx(1.0, abs=0.01)
    assert np.std(np.log(samples)) == pytest.approx(0.15, rel=0.05)


@pytest.mark.parametrize("tail", [{"noise": 0.7}, {"pareto": 2.5}, {"bimodal": 10.0}])
def test_factors_with_a_tail_have_a_mean_of_one(sim, tail):
    profile = sim.profiles.GPU
    service = sim.profiles.Service(profile, seed=1, **tail)
    factors = [service.seconds(8) / profile.cost(8) for _ in range(20_000)]
    assert np.mean(factors) == pytest.approx(1.0, abs=0.02)
    assert max(factors) > 5.0


def test_a_batch_that_meets_a_pause_ends_so_much_later(sim):
    service = sim.profiles.Service(sim.profiles.GPU, pauses=[sim.profiles.Pause(1.0, 0.5)])
    cost = sim.profiles.GPU.cost(4)
    starts = (0.5, 1.0 - cost / 2, 1.2, 1.5)
    assert [service.seconds(4, start) for start in starts] == pytest.approx(
        [cost, cost + 0.5, cost + 0.3, cost]
    )


def test_full_batches_are_not_the_best_where_costs_are_no_line(sim):
    for profile in (*sim.profiles.CLIFFS, *sim.profiles.CONVEX):
        full = profile.size / profile.cost(profile.size)
        assert 0.5 * profile.capacity() < full < 0.9 * profile.capacity()
    assert sim.profiles.GPU.capacity(2) == 64 / sim.profiles.GPU.cost(32)


def test_cold_starts_are_cold(sim):
    """Where batches take longer than the goal nobody can be in time; only who has costs knows."""
    crowd, slow = [0.0] * 200, {"slowdowns": [sim.profiles.Slowdown(0.0, 20.0)]}
    warm, cold = (
        _run(sim, contender, crowd, **slow)
        for contender in (sim.contenders.ADAPTIVE, sim.contenders.COLD)
    )
    assert warm.refused.any()
    assert not cold.refused.any()


def test_before_a_goal_is_set_nobody_is_refused(sim):
    case = sim.grid.Case("gpu", "Poisson", 1.5, requests=500, uncounted=150)
    moments = case.moments(0)
    simulation = sim.engine.Simulation(
        sim.contenders.LATE_GOAL, sim.profiles.Service(sim.profiles.GPU)
    )
    simulation.loop.call_at(moments[150], simulation.set_goal)
    outcome = simulation.run(sim.clients.OpenLoop(simulation.loop, 0.05, moments))
    early = outcome.arrived < moments[150]
    assert not outcome.refused[early].any()
    assert (outcome.refused | outcome.shed)[~early].any()
    counted = case.outcome(sim.contenders.LATE_GOAL, 0)
    assert np.array_equal(counted.good, outcome.good[150:])


_BOUNDED = ["cliff", "convex", "first", "workers", "pauses", "bursts", "flash", "on-off", "traces"]


def test_nobody_beats_the_optimum(sim):
    case = sim.grid.Case("tight", "MMPP 3", 0.95, requests=300, seeds=1)
    result = sim.grid.run(case, (*sim.grid.names_for(1), sim.grid.OPTIMUM))
    assert min(result.regret(name) for name in sim.grid.names_for(1)) >= 0.0


@pytest.mark.parametrize("name", _BOUNDED)
def test_nobody_beats_the_bound_of_a_group(sim, name):
    case = sim.groups.cases(name, "tune", repetitions=1, requests=300)[-1]
    result = sim.grid.run(case, sim.groups.GROUPS[name].names(case.workers))
    assert min(result.regret(contender) for contender in result.figures) >= 0.0


def test_groups_have_their_sizes_and_seeds_of_their_own(sim):
    sizes = {
        "smooth": 60,
        "heavy": 27,
        "cliff": 8,
        "convex": 8,
        "first": 16,
        "workers": 64,
        "pauses": 24,
    }
    for name, size in sizes.items():
        tuned, reported = (sim.groups.cases(name, seeds) for seeds in ("tune", "report"))
        assert len({case.name for case in tuned}) == len(reported) == size
        assert not {*tuned[0].all_seeds} & {*reported[0].all_seeds}


def test_a_baseline_is_read_as_it_was_written(sim, tmp_path):
    file = tmp_path / "baseline.json"
    baseline = sim.group_report.Baseline("python", {"tune": {"heavy": {"adaptive": 62.5}}}, [1, 2])
    baseline.write(file)
    assert sim.group_report.Baseline.read(file) == baseline
    assert {*sim.group_report.Baseline.read(_FOLDER / "baseline.json").goodput["report"]} == {
        *sim.groups.GROUPS
    }


# -- the other servers' rules ----------------------------------------------------------------------


def test_torchserve_counts_its_window_from_the_poll(sim):
    cost = sim.profiles.GPU.cost
    # The second comes while the first runs, and waits a whole window after that.
    outcome = _run(sim, sim.contenders.TORCHSERVE, [0.0, 0.011])
    assert outcome.latency[0] == pytest.approx(0.010 + cost(1))
    assert outcome.arrived[1] + outcome.latency[1] == pytest.approx(
        0.010 + cost(1) + 0.010 + cost(1)
    )
    # The window of the production is counted from the arrival.
    outcome = _run(sim, sim.contenders.SHORT_WINDOW, [0.0, 0.011])
    assert outcome.latency[1] == pytest.approx(0.010 + cost(1))


def test_torchserve_turns_the_101st_away(sim):
    outcome = _run(sim, sim.contenders.TORCHSERVE, np.linspace(0.0, 0.001, 140))
    # 32 fill the first batch at once; 100 wait.
    assert int(outcome.refused.sum()) == 8


def test_take_living_leaves_the_expired_behind(sim):
    outcome = _run(sim, sim.contenders.TAKE_LIVING, np.linspace(0.0, 0.001, 200))
    assert outcome.shed.any()
    assert not outcome.refused.any()


def test_aimd_starts_at_one_and_grows_by_one(sim):
    outcome = _run(sim, sim.contenders.AIMD, [0.0] * 10)
    assert outcome.sizes.tolist() == [1, 2, 3, 4]


def test_cork_sheds_heads_until_the_line_as_one_batch_suits_the_next(sim):
    gpu = sim.profiles.GPU
    cork = sim.baselines.Cork(gpu.size, gpu.goal, gpu.alpha, gpu.beta)
    line = _Line([0.0, 0.001, 0.030, 0.031], gpu.goal)
    plan = cork.plan(0.047, line, None)
    # 47 ms waited + 4 * 0.35 + 4 >= 50; 46 ms + 3 * 0.35 + 4 >= 50; the third has time.
    assert (plan.shed, plan.take) == (2, 2)


def test_cork_fits_a_line_to_its_batches(sim):
    gpu = sim.profiles.GPU
    cork = sim.baselines.Cork(gpu.size, gpu.goal)
    for at, count in enumerate((1, 2, 4, 8)):
        jobs = [SimpleNamespace(arrived=10.0 * at - 0.002)] * count
        cork.observed(_Sized(jobs, 10.0 * at), gpu.cost(count))
    assert (cork.alpha, cork.beta) == pytest.approx((gpu.alpha, gpu.beta))
    # Used to 2 ms, it holds one that has just come, and lets it go when its time is up.
    line = _Line([50.0], gpu.goal)
    assert cork.plan(50.0, line, None).take == 0
    assert cork.plan(50.0 + 0.001, line, None).take == 1


class _Line:
    """Jobs that came at these moments."""

    def __init__(self, arrivals: Sequence[float], goal: float) -> None:
        self._deadlines = [arrived + goal for arrived in arrivals]

    def __len__(self) -> int:
        return len(self._deadlines)

    def deadline_at(self, index: int) -> float:
        return self._deadlines[index]


class _Sized:
    """As much of a batch as a learner looks at."""

    def __init__(self, jobs: Sequence[Any], closed: float) -> None:
        self.jobs = jobs
        self.closed = closed

    def __len__(self) -> int:
        return len(self.jobs)


# -- figures ---------------------------------------------------------------------------------------


def test_shares_of_an_outcome(sim):
    answers = ("good", "late", "refused", "shed")
    client = SimpleNamespace(goal=1.0, loop=None, answered=lambda _: None)
    requests = [sim.clients.Request(float(at), client) for at in range(4)]
    for at, fate in enumerate(answers):
        if fate in ("good", "late"):
            requests[at].answered = at + (0.5 if fate == "good" else 1.5)
        else:
            requests[at].error = fate
    outcome = sim.outcome.Outcome.of(requests, [2], 1.0)
    assert (outcome.goodput, outcome.late, outcome.turned_away) == (0.25, 0.5, 0.5)
    assert outcome.mean_latency == pytest.approx(1.0)
    assert outcome.good_latency() == pytest.approx(0.5)
    assert math.isnan(outcome.latency[2])


# -- what the policy is held to --------------------------------------------------------------------


@pytest.mark.parametrize("profile", ["gpu", "tight"])
@pytest.mark.parametrize("load", [0.8, 0.95, 1.2])
def test_the_adaptive_policy_stays_close_to_the_optimum(sim, profile, load):
    """A small part of the grid, with seeds of its own: what it lacks is in hundredths."""
    grid = sim.grid
    case = grid.Case(profile, grid.POISSON, load, requests=1000, seeds=2)
    result = grid.run(case, ("adaptive", grid.OPTIMUM))
    assert result.regret("adaptive") <= 0.03


@pytest.mark.parametrize(
    ("group", "place", "uncounted", "limit"),
    [
        ("cliff", 2, 1000, 0.03),  # load 0.95
        ("convex", 6, 1000, 0.03),
        ("first", 6, 0, 0.05),  # tight, load 0.95
        ("workers", 8, 0, 0.03),  # tight, load 0.5
        ("pauses", 4, 0, 0.10),
        ("bursts", 12, 0, 0.05),
    ],
)
@pytest.mark.parametrize("start", ["adaptive", "adaptive, cold"])
def test_the_adaptive_policy_stays_close_in_hard_cases(sim, start, group, place, uncounted, limit):
    """One case of each group, with seeds of its own; costs measured before, or never."""
    requests = 300 if group == "first" else 1000
    case = replace(
        sim.groups.cases(group, "tune", repetitions=2)[place],
        first_seed=500,
        requests=requests,
        uncounted=uncounted,
    )
    result = sim.grid.run(case, (start, sim.grid.OPTIMUM))
    assert result.regret(start) <= limit


@pytest.mark.parametrize(("arrivals", "load"), [("gamma CV 0.5", 0.9), ("Poisson", 0.85)])
def test_several_workers_near_their_capacity_run_full_batches(sim, arrivals, load):
    case = sim.grid.Case("tight", arrivals, load, workers=4, requests=4000)
    found = [case.outcome(sim.contenders.ADAPTIVE, seed).goodput for seed in (0, 500)]
    assert np.mean(found) >= 0.97


@pytest.mark.parametrize("is_busy_at_load", [True, False])
def test_an_automatic_size_on_a_busy_machine_is_as_good_as_a_given_one(sim, is_busy_at_load):
    """Small batches wait for a processor as long as large ones do."""

    def answered(contender, size, seed):
        profile = sim.profiles.Profile("digits", 0.00024, 0.0016, size, 0.100)
        service = sim.profiles.Service(profile, seed=seed, waits=0.012 if is_busy_at_load else 0.0)
        simulation = sim.engine.Simulation(contender, service)
        service.waits = 0.012
        clients = sim.clients.ClosedLoop(simulation.loop, profile.goal, 64, 3000)
        outcome = simulation.run(clients)
        return float(outcome.good.sum() / outcome.arrived[-1])

    for seed in range(4):
        given = answered(sim.contenders.COLD, 32, seed)
        automatic = answered(sim.contenders.AUTOMATIC, 128, seed)
        assert automatic >= 0.65 * given


@pytest.mark.parametrize(
    ("profile", "load", "slower", "limit"),
    [("flat", 0.3, 2, 0.05), ("gpu", 0.3, 2, 0.02), ("gpu", 0.2, 3, 0.15)],
)
def test_a_cold_start_on_a_machine_that_becomes_slower_keeps_its_batches_large(
    sim, profile, load, slower, limit
):
    """Sizes that were first seen on the slow machine seem to have less throughput than others."""
    case = sim.grid.Case(
        profile, sim.grid.POISSON, load, slower=slower, slow_from=0.02, requests=3000
    )
    for seed in (0, 500):
        warm, cold = (
            case.outcome(contender, seed).goodput
            for contender in (sim.contenders.ADAPTIVE, sim.contenders.COLD)
        )
        assert cold >= warm - limit


def test_long_requests_do_not_starve_and_cost_few_short_ones(sim):
    """With the cost of a full batch a third of the longest tenth was in time."""
    by_length = sim.by_length
    contender = next(one for one in by_length.CONTENDERS if one.name == "adaptive, by length")
    model, count = by_length.MODELS[0], 4000
    runs = [by_length.run(contender, model, 0.9, count, seed) for seed in (500, 501)]
    assert np.mean([longest for _, _, longest in runs]) >= 0.55
    assert np.mean([outcome.goodput for outcome, _, _ in runs]) >= 0.87


def test_what_a_schedule_by_length_can_reach(sim):
    """At a load of 1.3 four fifths of all and half of the longest tenth are out of reach."""
    by_length, curve = sim.by_length, sim.length_bound.curve
    encoder, _, _, _, even, _ = by_length.MODELS
    ((all_, _),) = curve(even, 1.3, [0.0])
    assert all_ == pytest.approx(1 / 1.3, abs=0.005)  # full batches, without any padding
    ((all_, longest),) = curve(encoder, 1.3, [0.475])
    assert longest == pytest.approx(0.475, abs=0.001)
    assert all_ < 0.75
    ((without, _),) = curve(encoder, 1.3, [0.475], is_fair=False)
    assert without > 0.8  # by refusing requests that are a little shorter
    contender = next(one for one in by_length.CONTENDERS if one.name == "adaptive, by length")
    outcome, _, share = by_length.run(contender, encoder, 1.3, 4000, 500)
    ((all_, _),) = curve(encoder, 1.3, [share])
    assert all_ - 0.08 < outcome.goodput < all_


def test_by_length_ends_where_lengths_do_not_matter(sim):
    """Batches of similar lengths are smaller, so that with it fewer were in time."""
    by_length = sim.by_length
    contenders = {one.name: one for one in by_length.CONTENDERS}
    in_order, asked = (
        by_length.run(contenders[name], by_length.MODELS[-1], 1.3, 4000, 500)[0].goodput
        for name in ("adaptive, in order", "adaptive, by length")
    )
    assert asked >= in_order - 0.02


def test_batches_by_length_pay_where_inputs_are_padded(sim):
    """In time, and for long requests too; and they cost nothing where all are of one length."""
    by_length = sim.by_length
    contenders = {one.name: one for one in by_length.CONTENDERS}
    encoder, _, _, _, even, _ = by_length.MODELS

    def goodput(name, model):
        return float(by_length.run(contenders[name], model, 0.6, 3000, 500)[0].goodput)

    in_order = goodput("adaptive, in order", encoder)
    assert goodput("adaptive, by length", encoder) >= max(0.95, in_order + 0.2)
    assert goodput("adaptive, auto", encoder) >= max(0.9, in_order + 0.2)
    for name in ("adaptive, by length", "adaptive, auto"):
        assert goodput(name, even) >= goodput("adaptive, in order", even) - 0.005


def test_the_adaptive_policy_stays_close_to_the_best_where_costs_have_a_tail(sim):
    found = sim.groups.cases("heavy", "tune", repetitions=2)[4]  # sigma 1, load 0.5
    case = replace(found, first_seed=500, requests=2000)
    assert sim.grid.run(case, sim.groups.GROUPS["heavy"].names(1)).regret("adaptive") <= 0.05


# -- replicas --------------------------------------------------------------------------------------


def test_one_queue_is_what_one_replica_is(sim):
    setup = sim.replicas.Setup(sim.profiles.GPU, sim.contenders.ADAPTIVE, 1, 0.8)
    alone = setup.run(None, 1, 500)
    for router in sim.replicas.ROUTERS.values():
        split = setup.run(router, 1, 500)
        assert np.array_equal(split.latency, alone.latency)
        assert np.array_equal(split.sizes, alone.sizes)


@pytest.mark.parametrize("load", [0.5, 1.5])
def test_every_request_to_replicas_is_answered_or_refused(sim, load):
    setup = sim.replicas.Setup(sim.profiles.GPU, sim.contenders.ADAPTIVE, 3, load, slower=3.0)
    for name, router in sim.replicas.ROUTERS.items():
        for one in (router, sim.replicas.passing_over_full(router, sim.profiles.GPU.goal)):
            outcome = setup.run(one, 1, 600)
            answered = np.isfinite(outcome.latency)
            assert (answered ^ (outcome.refused | outcome.shed)).all(), name
            assert len(outcome.arrived) == 540  # without those of the beginning
