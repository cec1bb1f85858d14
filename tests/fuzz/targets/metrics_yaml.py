"""metrics.yaml, which names the metrics that are reported."""

from fuzz.limits import Limits
from fuzz.oracles import check_refusal
from steps import page_of

from marserve.frontend.telemetry.handler_metrics import HandlerMetrics
from marserve.frontend.telemetry.metrics_config import MetricsConfigError, parse_metrics_config
from marserve.frontend.telemetry.series import Registry

LIMITS = Limits(calls=600_000, calls_per_byte=300)


def target(data: bytes) -> None:
    """Report each metric that a file declares, unless the file is refused."""
    try:
        config = parse_metrics_config(data)
    except MetricsConfigError as error:
        check_refusal(error)
        return
    registry = Registry()
    metrics = HandlerMetrics(registry, "host", config)
    for declared in config.model.values():
        family = metrics.families[declared.name]
        family.join(*("v" for _ in declared.dimensions)).update(1.0)
    page_of(registry)
