"""The page of metrics in Prometheus' text format 0.0.4, as TorchServe's Java client writes it.

Scripts compare the text: a comma follows the last label, numbers have Java's format, and a counter
has the suffix ``_total`` only if its name has. prometheus_client writes neither.
"""

import math
from collections.abc import Callable, Collection
from decimal import Decimal

from marserve.frontend.telemetry.series import Registry

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def render(
    registry: Registry,
    only: Collection[str] = (),
    includes: Callable[[str], bool] = lambda _name: True,
) -> str:
    """Return the metrics for which ``includes`` is true, as text.

    If ``only`` contains names, return only the samples with these names.
    """
    names, lines = frozenset(only), list[str]()
    for metric in registry:
        if not includes(metric.name):
            continue
        samples = [
            (metric.name + suffix, labels, value) for suffix, labels, value in metric.samples()
        ]
        if names:
            samples = [sample for sample in samples if sample[0] in names]
            if not samples:
                continue
        lines.append(f"# HELP {metric.name} {_escape(metric.help)}\n")
        lines.append(f"# TYPE {metric.name} {metric.kind}\n")
        for name, labels, value in samples:
            lines.append(f"{name}{_braced(labels)} {_number(value)}\n")
    return "".join(lines)


def java_number(value: float) -> str:
    """Format a finite number as Java's ``Double.toString``: ``75.0``, ``1.2E7``, ``1.0E-4``."""
    if value == 0 or 1e-3 <= abs(value) < 1e7:
        return repr(float(value))
    sign, digits, exponent = Decimal(repr(value)).normalize().as_tuple()
    assert isinstance(exponent, int)  # the number is finite
    first, *others = map(str, digits)
    power = exponent + len(others)
    return f"{'-' if sign else ''}{first}.{''.join(others) or '0'}E{power}"


def _braced(labels: Collection[tuple[str, str | float]]) -> str:
    if not labels:
        return ""
    pairs = (
        f'{key}="{quote(value) if isinstance(value, str) else _number(value)}",'
        for key, value in labels
    )
    return f"{{{''.join(pairs)}}}"


def _number(value: float) -> str:
    if math.isfinite(value):
        return java_number(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


def quote(text: str) -> str:
    """Return the text of a label's value."""
    return _escape(text).replace('"', r"\"")
