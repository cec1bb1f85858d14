"""The metrics of the server and of the built-in handlers."""

from marserve.frontend.rest.endpoints import watch_bytes
from marserve.frontend.serving.monitoring import watch_models
from marserve.frontend.serving.registry import ModelRegistry
from marserve.frontend.telemetry.metrics import CatalogMetrics, Metrics
from marserve.frontend.telemetry.series import Family, WatchedGauge
from reference.markdown import anchored, code, table

_OURS = "marserve_"


def metrics() -> str:
    """Return tables of all series with types and labels."""
    server = Metrics("host")
    CatalogMetrics(server).watch_pending(lambda: 0)
    watch_models(server, ModelRegistry())
    watch_bytes(server, {})
    found = list(server.registry)
    of_handlers = server.config.model
    groups = {
        "TorchServe's": [item for item in found if item.name in server.config.ts],
        "New": [item for item in found if item.name.startswith(_OURS)],
        "Of handlers": [item for item in found if item.name in of_handlers],
    }
    left_out = [item.name for item in found if all(item not in each for each in groups.values())]
    if left_out:
        raise ValueError(f"metrics of no group: {left_out}")
    return "\n".join(f"## {heading}\n\n{_table(items)}" for heading, items in groups.items())


def _table(items: list[Family | WatchedGauge]) -> str:
    rows = ((anchored(item.name), item.kind, *_details(item)) for item in items)
    return table(["Name", "Type", "Labels", "Unit", "What"], rows)


def _details(item: Family | WatchedGauge) -> tuple[str, str, str]:
    if isinstance(item, WatchedGauge):
        return ", ".join(map(code, item.labels)), "", item.help
    declared = item.declared
    return ", ".join(map(code, declared.dimensions)), declared.unit, declared.text
