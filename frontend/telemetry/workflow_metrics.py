"""Metrics of workflows and their nodes; the model of a node has its own metrics besides."""

from collections.abc import Iterable

from marserve.frontend.telemetry.metrics import Metrics
from marserve.frontend.telemetry.series import Series

_OUTCOMES = ("answered", "failed", "expired", "cancelled", "refused")


class WorkflowMetrics:
    """The metrics of a workflow, on the page until it is closed."""

    def __init__(self, metrics: Metrics, name: str, nodes: Iterable[str]) -> None:
        self._joined: list[Series] = []

        def join(metric: str, *values: str) -> Series:
            family = metrics.added[f"marserve_workflow_{metric}"]
            series = family.join(name, *values, metrics.hostname)
            series.show()
            self._joined.append(series)
            return series

        self.runs = {outcome: join("runs_total", outcome) for outcome in _OUTCOMES}
        self.seconds = join("run_seconds")  # of runs that were answered
        self.node_seconds = {node: join("node_seconds", node) for node in nodes}
        self.failed_tries = {node: join("failed_tries_total", node) for node in nodes}

    def close(self) -> None:
        """Remove them from the page."""
        for series in self._joined:
            series.leave()
