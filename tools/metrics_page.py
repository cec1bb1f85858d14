"""Read the metrics page of a server, ours or TorchServe's."""

from typing import TYPE_CHECKING

from marserve.tools.bench.errors import BenchError

if TYPE_CHECKING:
    from prometheus_client import Metric


def metric_families(text: str) -> "list[Metric]":
    """Return the families of a text in Prometheus' format; none if it has another format.

    Raises:
        BenchError: prometheus_client is not installed.
    """
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError as error:
        raise BenchError(
            "The metrics of a server are read with prometheus-client, of the extra bench: "
            "pip install prometheus-client"
        ) from error
    try:
        return [*text_string_to_metric_families(text)]
    except (ValueError, LookupError):
        return []
