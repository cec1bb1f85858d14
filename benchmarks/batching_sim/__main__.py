"""Proves the batching policies in simulation: who answers how much in time, against the optimum.

    python benchmarks/batching_sim [--quick] [--out DIR]
    python benchmarks/batching_sim --groups heavy,cliff [--seeds report] [--cases]
    python benchmarks/batching_sim --groups lengths,replicas [--seeds report]
    python benchmarks/batching_sim --draw [--groups replicas] [--out DIR]

The production's batcher, queue, policies and learnt costs run in virtual time against other
servers' rules and the exact offline optimum. Prints tables and goals, and draws pictures. With
--groups it runs the groups of hard cases instead, with --draw it draws them. Nothing here fails
when a goal is missed.
"""

import argparse
import importlib.util
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import by_length
import closed_loops
import grid
import group_report
import groups
import impatient
import replicas
import report
import scenarios
from contenders import ADAPTIVE, LONG_WINDOW, TAKE_ALL
from grid import OPTIMUM, Case, Result
from group_report import Baseline
from scenarios import Story
from workloads import WORKLOADS

_NOISE = 0.15
#: Groups with tables of their own.
_TABLES = {
    module.NAME: module.print_all for module in (by_length, closed_loops, impatient, replicas)
}
_BASELINE = Path(__file__).with_name("baseline.json")


def main() -> None:
    """Run what is asked for."""
    options = _parse()
    if options.draw:
        _draw_groups(options)
    elif options.groups:
        _run_groups(options)
    else:
        _run_grid(options)


def _run_groups(options: argparse.Namespace) -> None:
    names = list(groups.GROUPS) if options.groups == "all" else options.groups.split(",")
    if options.record_baseline:
        _record_baseline(names, options)
        return
    names += [*_TABLES] * (options.groups == "all")
    results = {}
    for name in names:
        begun = time.monotonic()
        if name in _TABLES:
            _TABLES[name](options.seeds, options.repetitions, options.requests)
            continue
        title = groups.GROUPS[name].title
        results[name] = some = _run_group(name, options.seeds, options)
        group_report.print_group(title, some)
        if options.cases:
            group_report.print_cases(title, some)
        print(f"\n{time.monotonic() - begun:.0f} s")
    if not (options.policies or options.requests or options.repetitions):
        baseline, speed = Baseline.read(_BASELINE), scenarios.speed_of_decisions()
        report.print_goals(group_report.group_goals(results, options.seeds, baseline, speed))


def _run_group(name: str, seeds: str, options: argparse.Namespace) -> list[Result]:
    group = groups.GROUPS[name]
    words = options.policies.split(",") if options.policies else None
    cases = groups.cases(name, seeds, options.repetitions, options.requests)
    jobs = [(case, group.names(case.workers, words)) for case in cases]
    return grid.run_all(jobs, options.processes)


def _record_baseline(names: Sequence[str], options: argparse.Namespace) -> None:
    results = {
        seeds: {name: _run_group(name, seeds, options) for name in names}
        for seeds in groups.FIRST_SEED
    }
    command = " ".join(["python", "benchmarks/batching_sim", *sys.argv[1:]])
    Baseline.of(command, results, scenarios.speed_of_decisions()).write(_BASELINE)


def _run_grid(options: argparse.Namespace) -> None:
    begun = time.monotonic()
    single = grid.single_worker(*((1500, 1) if options.quick else (2000, 3)))
    several = grid.several_workers(*((4000, 1) if options.quick else (8000, 2)))
    single_worker = _run(single, (*grid.names_for(1), OPTIMUM))
    four = _run(several, grid.names_for(4))
    ours = (TAKE_ALL.name, ADAPTIVE.name)
    noisy = _run([replace(case, noise=_NOISE) for case in single], ours)
    noisy_four = _run([replace(case, noise=_NOISE) for case in several], ours)
    other = _run(_other_arrivals(single), (*grid.names_for(1), OPTIMUM))

    report.print_grid(
        f"1 worker, {len(single_worker)} cases: goodput %, mean (worst)", single_worker
    )
    report.print_worst(single_worker, 6)
    report.print_grid(f"4 workers, {len(four)} cases", four)
    report.print_grid(f"1 worker, other arrivals, {len(other)} cases", other)
    report.print_grid(f"1 worker, noise {_NOISE}", noisy)
    report.print_grid(f"4 workers, noise {_NOISE}", noisy_four)
    step = _tell_stories(500 if options.quick else 3000)
    speed = scenarios.decisions_per_second(2000 if options.quick else 20000)
    report.print_goals(report.goals(single_worker, four, noisy, noisy_four, speed))
    _draw(options.out, single_worker, step, 1000 if options.quick else 10000)
    print(f"\n{time.monotonic() - begun:.0f} s")


def _tell_stories(requests: int) -> Sequence[Story]:
    """What is no grid; returns the load step."""
    step = scenarios.load_step()
    report.print_stories("Load 0.2, 1.5, 0.2 on the GPU", step)
    report.print_stories("Batches cost twice as much from the middle on", scenarios.cost_drift())
    report.print_closed_loops(
        {count: scenarios.closed_loop(count, requests) for count in scenarios.CLIENTS}
    )
    return step


def _run(cases: Sequence[Case], names: Sequence[str]) -> list[Result]:
    return grid.run_all([(case, names) for case in cases])


def _other_arrivals(cases: Sequence[Case]) -> list[Case]:
    """The same with the workloads that the grid leaves out."""
    first = grid.ARRIVALS[0]
    return [
        replace(case, arrivals=name)
        for name in WORKLOADS
        if name not in grid.ARRIVALS
        for case in cases
        if case.arrivals == first
    ]


def _draw(directory: Path, results: Sequence[Result], step: Sequence[Story], requests: int) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        print("\nNo pictures: they need matplotlib (pip install matplotlib).")
        return
    import plots  # here, for the tables do without matplotlib

    names = (*grid.names_for(1), LONG_WINDOW.name, OPTIMUM)
    plots.draw_all(directory, plots.Drawn(_run(grid.curves(requests), names), results, step))
    print(f"\nPictures are in {directory}.")


def _draw_groups(options: argparse.Namespace) -> None:
    import group_plots  # here, for the tables do without matplotlib
    import replica_plots

    if options.groups != replicas.NAME:
        group_plots.draw(options.out, options.processes)
    replica_plots.draw(options.out)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer and shorter runs")
    parser.add_argument(
        "--out", type=Path, default=Path("logs/batching_sim"), help="directory for the pictures"
    )
    some = parser.add_argument_group("groups of hard cases")
    names = ",".join((*groups.GROUPS, *_TABLES))
    some.add_argument("--draw", action="store_true", help="only their pictures")
    some.add_argument("--groups", help=f"all, or some of {names}")
    some.add_argument("--seeds", choices=groups.FIRST_SEED, default="tune", help="default: tune")
    some.add_argument("--cases", action="store_true", help="also a row for each case")
    some.add_argument("--policies", help="only those whose names contain one of these words: a,b")
    some.add_argument("--requests", type=int, help="for each run, instead of the group's own")
    some.add_argument("--repetitions", type=int, help="seeds for each case")
    some.add_argument("--processes", type=int, default=1)
    some.add_argument(
        "--record-baseline",
        action="store_true",
        help="write what is reached into the file that goals are held against",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
