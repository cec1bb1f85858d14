"""Metrics of workflows and their nodes; the model of a node has its own metrics besides."""

from collections.abc import Iterable

from marserve.frontend.telemetry.metrics import Metrics
from marserve.frontend.telemetry.metrics_config import counter, histogram
from marserve.frontend.telemetry.series import Family, Series

_OUTCOMES = ("answered", "failed", "expired", "cancelled", "refused")
_WORKFLOW, _NODE = ("workflow_name", "hostname"), ("workflow_name", "node", "hostname")
_RUNS = counter(
    "marserve_workflow_runs_total",
    "Runs of a workflow by how they ended",
    ("workflow_name", "outcome", "hostname"),
)
_SECONDS = histogram(
    "marserve_workflow_run_seconds",
    "Seconds from the arrival of a request to the end of its run",
    _WORKFLOW,
)
_NODE_SECONDS = histogram(
    "marserve_workflow_node_seconds",
    "Seconds from the input of a node to its output, all tries included",
    _NODE,
)
_FAILED_TRIES = counter(
    "marserve_workflow_failed_tries_total", "Tries of a node that failed or took too long", _NODE
)


class WorkflowFamilies:
    """The metrics of all workflows."""

    def __init__(self, metrics: Metrics) -> None:
        self.hostname = metrics.hostname
        self.runs, self.seconds, self.node_seconds, self.failed_tries = (
            metrics.registry.add(declared)
            for declared in (_RUNS, _SECONDS, _NODE_SECONDS, _FAILED_TRIES)
        )


class WorkflowMetrics:
    """The metrics of a workflow; they are on the page until it is closed.

    Attributes:
        runs: By outcome.
        seconds: Of runs that were answered.
        node_seconds, failed_tries: By node.
    """

    def __init__(self, families: WorkflowFamilies, name: str, nodes: Iterable[str]) -> None:
        self._joined: list[Series] = []
        host, nodes = families.hostname, list(nodes)

        def join(family: Family, *values: str) -> Series:
            series = family.join(name, *values, host)
            series.show()
            self._joined.append(series)
            return series

        self.runs = {outcome: join(families.runs, outcome) for outcome in _OUTCOMES}
        self.seconds = join(families.seconds)
        self.node_seconds = {node: join(families.node_seconds, node) for node in nodes}
        self.failed_tries = {node: join(families.failed_tries, node) for node in nodes}

    def close(self) -> None:
        """Remove them from the page."""
        for series in self._joined:
            series.leave()
