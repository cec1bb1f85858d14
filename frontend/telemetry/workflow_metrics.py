"""What is counted of workflows and their nodes; each node's model has its own metrics besides."""

from collections.abc import Iterable

from marserve.frontend.telemetry.metrics import Metrics
from marserve.frontend.telemetry.metrics_config import BUCKETS, Declared
from marserve.frontend.telemetry.series import Family, Series

_OUTCOMES = ("answered", "failed", "expired", "cancelled", "refused")
_RUNS = Declared(
    "counter",
    "marserve_workflow_runs_total",
    "",
    ("workflow_name", "outcome", "hostname"),
    text="Runs of a workflow by how they ended",
)
_SECONDS = Declared(
    "histogram",
    "marserve_workflow_run_seconds",
    "",
    ("workflow_name", "hostname"),
    BUCKETS,
    "Seconds from the arrival of a request to the end of its run",
)
_NODE_SECONDS = Declared(
    "histogram",
    "marserve_workflow_node_seconds",
    "",
    ("workflow_name", "node", "hostname"),
    BUCKETS,
    "Seconds from when the input of a node is there until it has an output, all tries included",
)
_FAILED_TRIES = Declared(
    "counter",
    "marserve_workflow_failed_tries_total",
    "",
    ("workflow_name", "node", "hostname"),
    text="Tries of a node that failed or took too long",
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
        self.runs = {each: self._join(families.runs, name, each, host) for each in _OUTCOMES}
        self.seconds = self._join(families.seconds, name, host)
        self.node_seconds = {
            node: self._join(families.node_seconds, name, node, host) for node in nodes
        }
        self.failed_tries = {
            node: self._join(families.failed_tries, name, node, host) for node in nodes
        }

    def close(self) -> None:
        """Take them from the page."""
        for series in self._joined:
            series.leave()

    def _join(self, family: Family, *values: str) -> Series:
        series = family.join(*values)
        series.show()
        self._joined.append(series)
        return series
