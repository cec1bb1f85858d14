"""The result of tuning: the recommended settings, their measurements, and the rejected ones."""

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlencode

from marserve.tools.bench.measurement import Measurement, Point
from marserve.tools.bench.points import SERVER_ROWS
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

# Parameters of a registration, and keys of model-config.yaml and `models=`, by attribute of Point.
# Precision has neither: the handler reads it from model-config.yaml.
_PARAMETERS = {
    "workers": "initial_workers",
    **{name: row.parameter for name, row in SERVER_ROWS.items()},
}
_KEYS = {
    "workers": ("minWorkers", "maxWorkers"),
    **{name: (row.key,) for name, row in SERVER_ROWS.items()},
}

#: Rate of the confirming open loop as a share of the throughput at full load.
CONFIRMED_SHARE = 0.8
#: The same share where nothing meets the goal at that one.
LOWER_SHARE = 0.5
#: An open loop with a smaller share of its requests answered is overloaded.
KEPT_PACE = 0.95
# Relative differences of throughput below this are reported as none.
_NO_FASTER = 0.005


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A limit for a percentile of the latencies.

    Attributes:
        percent: The percentile, more than 0 and less than 100.
        latency_ms: The limit, milliseconds.

    Raises:
        ValueError: A value is out of range.
    """

    percent: float = 99.0
    latency_ms: float = 50.0

    def __post_init__(self) -> None:
        if not 0 < self.percent < 100:
            raise ValueError(
                f"The percentile of a goal is above 0 and below 100 %, not {self.percent:g}."
            )
        if not 0 < self.latency_ms < float("inf"):
            raise ValueError(f"A latency goal is above 0 ms, not {self.latency_ms:g}.")

    def latency_of(self, run: Measurement) -> float:
        """Return the latency of a run that the goal limits, milliseconds."""
        return run.percentile_ms(self.percent)

    def distance(self, run: Measurement) -> tuple[float, float]:
        """Return the sort key of successful runs; the smallest has the most requests in time."""
        return -run.within(self.latency_ms) / run.requests, self.latency_of(run)

    @property
    def percentile(self) -> str:
        """Return the name of the percentile, such as p99."""
        return f"p{self.percent:g}"

    def __str__(self) -> str:
        return f"{self.percentile} within {number(self.latency_ms)} ms"


@dataclass(frozen=True)
class Trial:
    """A measurement of the search.

    Attributes:
        run: The measurement.
        fault: Why the point is rejected, in a few words; empty if it meets the goal.
        is_useless: Whether the run failed, so that its latencies mean nothing.
    """

    run: Measurement
    fault: str
    is_useless: bool

    @classmethod
    def judged(cls, run: Measurement, goal: Goal, allowed_error_share: float) -> "Trial":
        """Compare a run with the goal."""
        failure = run.failure(allowed_error_share)
        return cls(run, failure or _fault(run, goal), bool(failure))


@dataclass(frozen=True)
class Choice:
    """The recommended settings and their measurements.

    Attributes:
        saturated: Closed loop at full load, with one waiting batch for each running one.
        confirmed: Open loop at `CONFIRMED_SHARE` of the throughput at full load, or at
            `LOWER_SHARE`; None if no open loop met the goal.
        nearest: Without a confirmed one, the open loop nearest to the goal; None if all failed.
    """

    saturated: Measurement
    confirmed: Measurement | None
    nearest: Measurement | None = None

    @property
    def point(self) -> Point:
        """Return the settings, with the load of the last run."""
        return (self.confirmed or self.nearest or self.saturated).point


@dataclass(frozen=True)
class Recommendation:
    """The result of a search.

    Attributes:
        goal: The latency goal.
        choice: The recommended settings; None if no point meets the goal.
        trials: All measurements in order.
        reasons: Why points that meet the goal were rejected, if their numbers do not show it.
        management_url: URL of the server's management listener.
    """

    goal: Goal
    choice: Choice | None
    trials: Sequence[Trial]
    reasons: Mapping[Point, str] = field(default_factory=dict)
    management_url: str = "http://127.0.0.1:8081"

    @property
    def nearest(self) -> Measurement | None:
        """Return the run with the most requests within the goal; None if no run succeeded.

        Runs under open load are preferred, because the goal is for open load.
        """
        runs = [trial.run for trial in self.trials if trial.fault and not trial.is_useless]
        opened = [run for run in runs if run.point.rate is not None]
        return min(opened or runs, key=self.goal.distance, default=None)

    @property
    def rejected(self) -> list[Trial]:
        """Return the best trial of each other point, with the reason of rejection as the fault."""
        best: dict[Point, Trial] = {}
        for trial in self.trials:
            known = best.setdefault(trial.run.point, trial)
            if self._is_better(trial, known):
                best[trial.run.point] = trial
        return [
            replace(item, fault=item.fault or self._rejection_reason(item.run))
            for point, item in best.items()
            if not (self.choice and bare(point) == bare(self.choice.point))
        ]

    def _is_better(self, trial: Trial, other: Trial) -> bool:
        if trial.is_useless or other.is_useless:
            return other.is_useless
        if trial.run.refused or other.run.refused:
            return self.goal.distance(trial.run) < self.goal.distance(other.run)
        return self.goal.latency_of(trial.run) < self.goal.latency_of(other.run)

    def rejected_cells(self) -> list[list[str]]:
        """Return the table of rejected points: the headings, then a line for each point."""
        rejected = self.rejected
        settings = varied([item.run.point for item in rejected])
        headings = [setting.heading for setting in settings]
        lines = [
            [*(plain(setting.of(trial.run.point)) for setting in settings), *self._found(trial)]
            for trial in rejected
        ]
        return [[*headings, "answers/s", f"{self.goal.percentile} ms", "rejected, for"], *lines]

    def text(self, model: str = "MODEL") -> str:
        """Return the report for a terminal; the recommendation comes last, after the table.

        Args:
            model: Name of the model, optionally with a version, as in `Target`.
        """
        parts = [aligned(self.rejected_cells(), prose=1)] if self.rejected else []
        parts.append(self.verdict())
        if self.choice:
            parts.append("model-config.yaml:\n" + _indented(self.yaml_lines()))
            parts.append("or, when registering:\n" + _indented([self.register_call(model)]))
            parts.append("or in config.properties:\n" + _indented([self.properties_line(model)]))
        return "\n\n".join(parts)

    def verdict(self) -> str:
        """Return the recommendation with its measurements, or that no point meets the goal."""
        if self.choice is None:
            return self._nothing()
        saturated, confirmed = self.choice.saturated, self.choice.confirmed
        return (
            f"Recommended for {self.goal}: {format_point(self.choice.point, SERVER_SETTINGS)}.\n"
            f"At full load ({format_point(saturated.point, LOAD)}): "
            f"{self._found_in(saturated)}.\n{self._confirmation(confirmed)}"
        )

    def _confirmation(self, confirmed: Measurement | None) -> str:
        assert self.choice is not None
        missed = f"at {CONFIRMED_SHARE:.0%} of the full load the goal was missed"
        if confirmed is None:
            sentence = f"Not confirmed: in an open loop {missed}, and at {LOWER_SHARE:.0%}, too."
            if (nearest := self.choice.nearest) is None:
                return f"{sentence} All runs failed."
            load = format_point(nearest.point, LOAD)
            return f"{sentence} The nearest ({load}): {self._found_in(nearest)}."
        assert confirmed.point.rate is not None
        is_lower = confirmed.point.rate < (CONFIRMED_SHARE + LOWER_SHARE) / 2 * (
            self.choice.saturated.throughput
        )
        return (
            f"Confirmed in an open loop ({format_point(confirmed.point, LOAD)}): "
            f"{self._found_in(confirmed)}{f'; {missed}' if is_lower else ''}."
        )

    def yaml_lines(self) -> list[str]:
        """Return the lines for model-config.yaml; none if no point meets the goal."""
        lines = [f"{key}: {value}" for key, value in self._keys().items()]
        if self.choice and self.choice.point.precision is not None:
            lines += ["optimization:", f"  precision: {self.choice.point.precision}"]
        return lines

    def register_call(self, model: str) -> str:
        """Return a curl command that registers the model with these settings."""
        name = model.partition(" ")[0]
        known = self._values().items()
        values = {_PARAMETERS[name]: item for name, item in known if name in _PARAMETERS}
        query = urlencode({"url": f"{name}.mar", **values})
        url, options = self.management_url.rstrip("/"), ["-X", "POST"]
        if url.startswith("unix:"):
            options += ["--unix-socket", url.removeprefix("unix:")]
            url = "http://localhost"
        return shlex.join(["curl", *options, f"{url}/models?{query}"])

    def properties_line(self, model: str) -> str:
        """Return the line for config.properties; ``model`` may contain a version."""
        name, _, version = model.partition(" ")
        settings = {"marName": f"{name}.mar", **self._keys()}
        return f"models={json.dumps({name: {version or '1.0': settings}})}"

    def document(self) -> dict[str, Any]:
        """Return the member ``recommendation`` of the JSON report."""
        return {
            "goal": {"percent": self.goal.percent, "latency_ms": self.goal.latency_ms},
            "is_met": self.choice is not None,
            "verdict": self.verdict(),
            "settings": self._values(),
            "model_config_yaml": self.yaml_lines(),
            "at_full_load": self._evidence(self.choice.saturated) if self.choice else None,
            "confirmed": (
                self._evidence(self.choice.confirmed)
                if self.choice and self.choice.confirmed
                else None
            ),
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

    def _found_in(self, run: Measurement) -> str:
        refused = f", {run.refused / run.requests:.1%} refused" if run.refused else ""
        latency = f"{self.goal.percentile} {number(self.goal.latency_of(run))} ms"
        return f"{number(run.throughput)} answers/s, {latency}{refused}"

    def _nothing(self) -> str:
        sentence = f"Nothing that was tried meets the goal of {self.goal}."
        return f"{sentence} {self._nearest_sentence()}"

    def _nearest_sentence(self) -> str:
        if (nearest := self.nearest) is not None:
            return f"The nearest is {format_point(nearest.point)}: {self._found_in(nearest)}."
        faults = [trial.fault for trial in self.trials if trial.is_useless]
        return f"No run was without errors. The last one: {faults[-1]}" if faults else ""

    def _rejection_reason(self, run: Measurement) -> str:
        """Return why a run that meets the goal is not the choice."""
        if self.choice is None or run.point in self.reasons:
            return self.reasons.get(run.point, "its settings meet the goal under this load only")
        if run.point.rate is not None:
            return f"slower than the choice at {number(run.point.rate)} requests/s"
        if _size(run.point) == _size(self.choice.point):
            return "the same size, with another batch policy or delay"
        gain = run.throughput / self.choice.saturated.throughput - 1
        if gain > _NO_FASTER:
            return f"only {gain:.0%} more throughput, with more workers or larger batches"
        return f"{-gain:.0%} less throughput" if gain < -_NO_FASTER else "no more throughput"


def bare(point: Point) -> Point:
    """Return the point without its load."""
    return replace(point, clients=None, rate=None)


def _size(point: Point) -> tuple[int | None, int | str | None]:
    return point.workers, point.batch_size


def _fault(run: Measurement, goal: Goal) -> str:
    latency = goal.latency_of(run)
    if latency > goal.latency_ms:
        return f"over the goal by {latency / goal.latency_ms - 1:.0%}"
    if run.refused and run.within(goal.latency_ms) / run.requests < goal.percent / 100:
        return f"{run.refused / run.requests:.1%} of the requests were refused"
    rate = run.point.rate
    if rate is not None and run.throughput < KEPT_PACE * rate:
        return f"only {number(run.throughput)} of {number(rate)} requests/s were answered"
    return ""


def _indented(lines: Iterable[str]) -> str:
    return "\n".join(f"  {line}" for line in lines)
