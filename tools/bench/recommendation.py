"""The result of tuning: the recommended settings, their measurements, and the rejected ones."""

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlencode

from marserve.tools.bench.measurement import Measurement, Point
from marserve.tools.bench.reports.columns import aligned
from marserve.tools.bench.reports.summary import (
    FAILED,
    NOTHING,
    SETTINGS,
    format_point,
    number,
    plain,
    varied,
)

LOAD = SETTINGS[:2]
SERVER_SETTINGS = SETTINGS[2:]
assert [item.name for item in LOAD] == ["clients", "rate"]

# By attribute of a point: parameter of a registration, and keys of model-config.yaml and `models=`.
# The precision is missing: the handler reads it, in model-config.yaml and nowhere else.
_PARAMETERS = {
    "workers": "initial_workers",
    "batch_size": "batch_size",
    "batch_policy": "batch_policy",
    "max_batch_delay_ms": "max_batch_delay",
    "max_latency_ms": "max_latency_ms",
    "torch_threads": "torch_threads",
    "outstanding_batches": "outstanding_batches",
}
_KEYS = {
    "workers": ("minWorkers", "maxWorkers"),
    "batch_size": ("batchSize",),
    "batch_policy": ("batchPolicy",),
    "max_batch_delay_ms": ("maxBatchDelay",),
    "max_latency_ms": ("maxLatencyMs",),
    "torch_threads": ("torchThreads",),
    "outstanding_batches": ("outstandingBatches",),
}

#: Of the throughput at full load, what is put on an open loop to confirm it.
CONFIRMED_SHARE = 0.8
#: An open loop whose answers fall behind its requests by more is overloaded, whatever it measured.
KEPT_PACE = 0.95
# Less is no difference.
_NO_FASTER = 0.005


@dataclass(frozen=True, kw_only=True)
class Goal:
    """So many percent of the answers within so many milliseconds.

    Raises:
        ValueError: There is no such percentile, or nothing is that fast.
    """

    percent: float = 99.0
    latency_ms: float = 50.0

    def __post_init__(self) -> None:
        if not 0 < self.percent < 100:
            raise ValueError(
                f"A goal is for more than 0 and less than 100 %, not {self.percent:g}."
            )
        if not 0 < self.latency_ms < float("inf"):
            raise ValueError(f"A latency goal is above 0 ms, not {self.latency_ms:g}.")

    def latency_of(self, run: Measurement) -> float:
        """What is held against the goal, milliseconds."""
        return run.percentile_ms(self.percent)

    @property
    def percentile(self) -> str:
        """Its name: p99."""
        return f"p{self.percent:g}"

    def __str__(self) -> str:
        return f"{self.percentile} within {number(self.latency_ms)} ms"


@dataclass(frozen=True)
class Trial:
    """A measurement on the way.

    Attributes:
        run: What was found.
        fault: Why it is no candidate, in a few words; empty for one that meets the goal.
        is_useless: Whether it failed, and says nothing about speed.
    """

    run: Measurement
    fault: str
    is_useless: bool

    @classmethod
    def judged(cls, run: Measurement, goal: Goal, allowed_error_share: float) -> "Trial":
        """Hold a run against the goal."""
        failure = run.failure(allowed_error_share)
        return cls(run, failure or _fault(run, goal), bool(failure))


@dataclass(frozen=True)
class Choice:
    """What is recommended, and what was measured there and nowhere else.

    Attributes:
        saturated: Closed loop with a batch waiting behind each that runs: all it can do.
        confirmed: Open loop at a share of that, as traffic comes.
    """

    saturated: Measurement
    confirmed: Measurement

    @property
    def point(self) -> Point:
        """The settings, with the load of the confirmation."""
        return self.confirmed.point


@dataclass(frozen=True)
class Recommendation:
    """The end of a search.

    Attributes:
        goal: What was wanted.
        choice: None if nothing meets the goal.
        trials: All that was measured, in order.
        reasons: Why points that keep to the goal were passed over, where their numbers do not say.
    """

    goal: Goal
    choice: Choice | None
    trials: Sequence[Trial]
    reasons: Mapping[Point, str] = field(default_factory=dict)

    @property
    def nearest(self) -> Measurement | None:
        """Where nothing meets the goal, what comes nearest; None if no run succeeded at all.

        Of those under open load if there are any: that is where it has to hold.
        """
        runs = [trial.run for trial in self.trials if trial.fault and not trial.is_useless]
        opened = [run for run in runs if run.point.rate is not None]
        return min(opened or runs, key=self.goal.latency_of, default=None)

    @property
    def rejected(self) -> list[Trial]:
        """The other points by their best run, each with its reason as the fault."""
        best: dict[Point, Trial] = {}
        for trial in self.trials:
            known = best.setdefault(trial.run.point, trial)
            if self._is_better(trial, known):
                best[trial.run.point] = trial
        return [
            replace(item, fault=item.fault or self._why_not(item.run))
            for point, item in best.items()
            if not (self.choice and bare(point) == bare(self.choice.point))
        ]

    def _is_better(self, trial: Trial, other: Trial) -> bool:
        if trial.is_useless or other.is_useless:
            return other.is_useless
        return self.goal.latency_of(trial.run) < self.goal.latency_of(other.run)

    def rejected_cells(self) -> list[list[str]]:
        """A table of those: headings, then a line for each, with the reason in the last column."""
        rejected = self.rejected
        settings = varied([item.run.point for item in rejected])
        headings = [setting.heading for setting in settings]
        lines = [
            [*(plain(setting.of(trial.run.point)) for setting in settings), *self._found(trial)]
            for trial in rejected
        ]
        return [[*headings, "answers/s", f"{self.goal.percentile} ms", "rejected, for"], *lines]

    def text(self, model: str = "MODEL") -> str:
        """All of it, for a terminal: what matters stands at the end, where eyes are.

        Args:
            model: Its name, for the lines to paste; as in a session.
        """
        parts = [aligned(self.rejected_cells(), prose=1)] if self.rejected else []
        parts.append(self.verdict())
        if self.choice:
            parts.append("model-config.yaml:\n" + _indented(self.yaml_lines()))
            parts.append("or, when registering:\n" + _indented([self.register_call(model)]))
            parts.append("or in config.properties:\n" + _indented([self.properties_line(model)]))
        return "\n\n".join(parts)

    def verdict(self) -> str:
        """What is recommended and what was measured there; or that nothing meets the goal."""
        if self.choice is None:
            return self._nothing()
        saturated, confirmed = self.choice.saturated, self.choice.confirmed
        return (
            f"Recommended for {self.goal}: {format_point(self.choice.point, SERVER_SETTINGS)}.\n"
            f"At full load ({format_point(saturated.point, LOAD)}): "
            f"{number(saturated.throughput)} answers/s, {self._latency(saturated)}.\n"
            f"Confirmed in an open loop ({format_point(confirmed.point, LOAD)}): "
            f"{number(confirmed.throughput)} answers/s, {self._latency(confirmed)}."
        )

    def yaml_lines(self) -> list[str]:
        """The lines of model-config.yaml; none if nothing meets the goal."""
        lines = [f"{key}: {value}" for key, value in self._keys().items()]
        if self.choice and self.choice.point.precision is not None:
            lines += ["optimization:", f"  precision: {self.choice.point.precision}"]
        return lines

    def register_call(self, model: str) -> str:
        """The call that registers the model with these settings; for its name as in a session."""
        name = model.partition(" ")[0]
        known = self._values().items()
        values = {_PARAMETERS[name]: item for name, item in known if name in _PARAMETERS}
        query = urlencode({"url": f"{name}.mar", **values})
        return f"curl -X POST {shlex.quote(f'http://localhost:8081/models?{query}')}"

    def properties_line(self, model: str) -> str:
        """The line of config.properties; for its name as in a session, maybe with a version."""
        name, _, version = model.partition(" ")
        settings = {"marName": f"{name}.mar", **self._keys()}
        return f"models={json.dumps({name: {version or '1.0': settings}})}"

    def document(self) -> dict[str, Any]:
        """As JSON is to have it."""
        return {
            "goal": {"percent": self.goal.percent, "latency_ms": self.goal.latency_ms},
            "is_met": self.choice is not None,
            "verdict": self.verdict(),
            "settings": self._values(),
            "model_config_yaml": self.yaml_lines(),
            "at_full_load": self._evidence(self.choice.saturated) if self.choice else None,
            "confirmed": self._evidence(self.choice.confirmed) if self.choice else None,
            "rejected": [self._rejection(item) for item in self.rejected],
        }

    def _evidence(self, run: Measurement) -> dict[str, Any]:
        return {
            "settings": {setting.name: setting.of(run.point) for setting in SETTINGS},
            "throughput_per_s": run.throughput,
            "latency_ms": self.goal.latency_of(run),
        }

    def _rejection(self, trial: Trial) -> dict[str, Any]:
        unknown = {"throughput_per_s": None, "latency_ms": None} if trial.is_useless else {}
        return {**self._evidence(trial.run), **unknown, "why": trial.fault}

    def _found(self, trial: Trial) -> list[str]:
        if trial.is_useless:
            return [FAILED, NOTHING, trial.fault]
        latency = self.goal.latency_of(trial.run)
        return [number(trial.run.throughput), number(latency), trial.fault]

    def _values(self) -> dict[str, Any]:
        if self.choice is None:
            return {}
        found = {
            server_setting.name: server_setting.of(self.choice.point)
            for server_setting in SERVER_SETTINGS
        }
        return {name: value for name, value in found.items() if value is not None}

    def _keys(self) -> dict[str, Any]:
        values = self._values().items()
        return {key: value for name, value in values for key in _KEYS.get(name, ())}

    def _latency(self, run: Measurement) -> str:
        return f"{self.goal.percentile} {number(self.goal.latency_of(run))} ms"

    def _nothing(self) -> str:
        sentence = f"Nothing that was tried meets the goal of {self.goal}."
        nearest = self.nearest
        if nearest is None:
            return f"{sentence} No run was without errors."
        return (
            f"{sentence} The nearest is {format_point(nearest.point)}: {self._latency(nearest)} at "
            f"{number(nearest.throughput)} answers/s."
        )

    def _why_not(self, run: Measurement) -> str:
        """Why a run that keeps to the goal is not the choice."""
        if self.choice is None or run.point in self.reasons:
            return self.reasons.get(run.point, "its settings keep to it under this load only")
        if run.point.rate is not None:
            return f"slower than the choice at {number(run.point.rate)} requests/s"
        if _size(run.point) == _size(self.choice.point):
            return "the same size, but for how batches wait"
        gain = run.throughput / self.choice.saturated.throughput - 1
        if gain > _NO_FASTER:
            return f"only {gain:.0%} more throughput, with more workers or larger batches"
        return f"{-gain:.0%} less throughput" if gain < -_NO_FASTER else "no more throughput"


def bare(point: Point) -> Point:
    """What the server was set to, without the load."""
    return replace(point, clients=None, rate=None)


def _size(point: Point) -> tuple[int | None, int | None]:
    return point.workers, point.batch_size


def _fault(run: Measurement, goal: Goal) -> str:
    latency = goal.latency_of(run)
    if latency > goal.latency_ms:
        return f"over the goal by {latency / goal.latency_ms - 1:.0%}"
    rate = run.point.rate
    if rate is not None and run.throughput < KEPT_PACE * rate:
        return f"only {number(run.throughput)} of {number(rate)} requests/s were answered"
    return ""


def _indented(lines: Iterable[str]) -> str:
    return "\n".join(f"  {line}" for line in lines)
