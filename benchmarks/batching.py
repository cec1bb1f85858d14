"""The batching policies on the real server, at loads below and above what the model can carry.

    python benchmarks/batching.py [synthetic] [cnn] [noisy] [cold] [--quick]

For each load the policies take turns, with the same arrivals, on one server and one worker; the
policy is changed while it serves (PUT /models). Goodput is the share of all requests that is
answered within the latency goal; the load is the rate of requests as a share of the largest
throughput, which is measured first. ``noisy`` has costs with a long tail; ``cold`` is no
comparison of policies, see `cold_starts`. Nothing here fails when a goal is missed.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import cold_starts
import known_cost_handler
import load
import open_loop
import psutil
import report
import yaml
from processes import Marserve, pack

_HERE = Path(__file__).resolve().parent
_LOADS = (0.2, 0.5, 0.8, 1.2)
_POLICIES = ("fixed", "greedy", "adaptive")
_DELAY_MS = 10


@dataclass(frozen=True)
class Case:
    """A model.

    Attributes:
        handler: Its file.
        body_bytes: Length of a request's body.
        size: Most requests in a batch.
        goal_ms: The latency goal.
        loads: As shares of the capacity.
        costs: For a handler that reads them from its model-config.yaml.
        seconds: How long a turn lasts.
    """

    handler: str
    body_bytes: int
    size: int
    goal_ms: int
    loads: Sequence[float] = _LOADS
    costs: Mapping[str, float] | None = None
    seconds: float = 6.0

    @property
    def known_capacity(self) -> float | None:
        """Requests per second in full batches, if the costs are set."""
        if self.costs is None:
            return None
        return (
            self.size * 1000 / (self.costs["perBatchMs"] + self.costs["perRequestMs"] * self.size)
        )


CASES = {
    "synthetic": Case("known_cost_handler.py", 1024, 32, 50),
    "cnn": Case("cnn_handler.py", 3 * 64 * 64, 32, 100),
    "noisy": Case(
        "cost_curve_handler.py",
        1024,
        32,
        200,
        loads=(0.5, 0.8),
        costs={"perBatchMs": 40, "perRequestMs": 3.5, "sigma": 1.0, "cliff": 32, "jumpMs": 0},
        seconds=15.0,  # a few hundred batches: their costs differ much
    ),
}
_COLD = "cold"


@dataclass(frozen=True)
class _Turn:
    policy: str
    outcome: open_loop.Outcome
    mean_batch: float


class _Bench:
    """One model on one server.

    Args:
        name: Of the case.
        server: A running one.
        directory: Where the body lies.
    """

    def __init__(self, name: str, server: Marserve, directory: Path) -> None:
        self.case = CASES[name]
        self._name = name
        self._server = server
        self._body = directory / "body"
        self._body.write_bytes(bytes(range(256)) * (self.case.body_bytes // 256))

    def use(self, policy: str) -> None:
        """Change the policy while it serves."""
        goal = f"&max_latency_ms={self.case.goal_ms}" if policy == "adaptive" else ""
        self._server.manage(
            "PUT",
            f"/models/{self._name}?batch_policy={policy}&batch_size={self.case.size}"
            f"&max_batch_delay={_DELAY_MS}{goal}",
        )

    def capacity(self, seconds: float) -> float:
        """Answers per second where there is always a full batch waiting."""
        self.use("greedy")
        clients = 2 * self.case.size
        return load.generate(
            load.Plan(
                self._server.inference_port,
                f"/predictions/{self._name}",
                str(self._body),
                clients,
                seconds,
                warm_up=1.0,
                step=self.case.size,
            )
        ).rate

    def turn(self, policy: str, rate: float, seconds: float, seed: int) -> _Turn:
        """One policy at one load."""
        self.use(policy)
        before = self._batches()
        outcome = open_loop.run(
            open_loop.Arrivals(
                self._server.inference_port,
                f"/predictions/{self._name}",
                str(self._body),
                rate,
                seconds,
                self.case.goal_ms / 1000,
                seed,
            )
        )
        jobs, batches = (new - old for new, old in zip(self._batches(), before, strict=True))
        return _Turn(policy, outcome, jobs / max(1.0, batches))

    def lone_ms(self, policy: str, seconds: float) -> tuple[float, float]:
        """Median latency of one client's requests, and the mean time in the handler."""
        self.use(policy)
        measured = load.generate(
            load.Plan(
                self._server.inference_port,
                f"/predictions/{self._name}",
                str(self._body),
                1,
                seconds,
            )
        )
        records = json.loads(self._server.manage("GET", f"/models/{self._name}/batches"))["batches"]
        return measured.p50_ms, statistics.median(one["tookMs"] for one in records)

    def _batches(self) -> tuple[float, float]:
        counted = self._server.counted
        return counted("marserve_batch_size_sum"), counted("marserve_batch_size_count")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the cases that are named, or all."""
    options = _parser().parse_args(argv)
    busy = psutil.cpu_percent(interval=1)
    tables = []
    with tempfile.TemporaryDirectory(prefix="marserve-bench-") as directory:
        for name in options.cases or (*CASES, _COLD):
            print(f"measuring {name} ...", file=sys.stderr, flush=True)
            if name == _COLD:
                rows = cold_starts.measure(Path(directory, name), quick=options.quick)
                tables.append("\n".join(["cold starts: answered in time, %", *_columns(rows)]))
            else:
                tables.append(_measure(name, Path(directory, name), options.quick))
    print(report.machine(busy))
    print("\n\n".join(tables))


def _measure(name: str, directory: Path, quick: bool) -> str:
    case = CASES[name]
    directory.mkdir()
    pack(directory / "store", {"model-name": name, **_files(case, directory)})
    repetitions, seconds = (1, 2.0) if quick else (3, case.seconds)
    with (
        Marserve(directory).running() as server,
        server.model(f"{name}.mar", batch_size=case.size, max_batch_delay=_DELAY_MS),
    ):
        bench = _Bench(name, server, directory)
        capacity = case.known_capacity or bench.capacity(seconds)
        rows = [_heading()]
        for share in case.loads:
            rows += _turns(bench, share, share * capacity, repetitions, seconds)
        # Where costs are noisy, policies with a goal may refuse a lone request, too.
        lone = [] if case.costs else [_lone_requests(bench, name, seconds)]
    title = f"{name}: capacity {capacity:.0f} requests/s, goal {case.goal_ms} ms, size {case.size}"
    return "\n".join([title, *_columns(rows), *lone])


def _files(case: Case, directory: Path) -> dict[str, str | Path]:
    files: dict[str, str | Path] = {"handler": _HERE / case.handler}
    if case.costs is not None:
        files["config-file"] = directory / "costs.yaml"
        Path(directory, "costs.yaml").write_text(yaml.safe_dump({"costs": dict(case.costs)}))
    return files


def _turns(
    bench: _Bench, share: float, rate: float, repetitions: int, seconds: float
) -> list[tuple[str, ...]]:
    by_policy: dict[str, list[_Turn]] = {policy: [] for policy in _POLICIES}
    for seed in range(repetitions):
        for policy in _POLICIES:
            by_policy[policy].append(bench.turn(policy, rate, seconds, seed))
            time.sleep(0.2)  # whatever an overload left behind
    return [_row(share, turns) for turns in by_policy.values()]


def _lone_requests(bench: _Bench, name: str, seconds: float) -> str:
    told = []
    for policy in _POLICIES:
        latency, took = bench.lone_ms(policy, min(seconds, 3.0))
        told.append(f"{policy} {latency:.2f} ms (worker {took:.2f})")
    known = ""
    if name == "synthetic":
        cost = (known_cost_handler.PER_BATCH + known_cost_handler.PER_REQUEST) * 1000
        known = f"; the model itself {cost:.2f} ms"
    return f"a lone request, median: {', '.join(told)}{known}"


def _heading() -> tuple[str, ...]:
    return ("load", "policy", "goodput %", "late %", "503 %", "p50 ms", "p99 ms", "mean batch")


def _row(share: float, turns: Sequence[_Turn]) -> tuple[str, ...]:
    outcomes = [one.outcome for one in turns]
    return (
        f"{share:g}",
        turns[0].policy,
        report.spread([100 * one.good for one in outcomes]),
        report.spread([100 * one.late for one in outcomes]),
        report.spread([100 * one.refused for one in outcomes]),
        report.spread([one.p50_ms for one in outcomes]),
        report.spread([one.p99_ms for one in outcomes]),
        report.spread([one.mean_batch for one in turns]),
    )


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", choices=[*CASES, _COLD, []], help="all by default")
    parser.add_argument("--quick", action="store_true", help="short and once: does it run at all?")
    return parser


if __name__ == "__main__":
    main()
