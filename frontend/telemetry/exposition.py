"""A registry that keeps names as they are declared, and its text (Prometheus format 0.0.4).

prometheus_client names a counter's samples ``NAME_total``; TorchServe's counters carry the suffix
only where their name has it already (``ts_inference_requests_total``). So the library counts and
collects, and the lines are written here: byte by byte as TorchServe's Java client wrote them, with
a comma behind the last label and numbers as Java shows them, because scripts match the text.
"""

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from decimal import Decimal

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
)
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SUFFIX = "_total"
_METRIC_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


class Registry(CollectorRegistry):
    """A registry that remembers which counters were declared with the suffix ``_total``."""

    def __init__(self) -> None:
        super().__init__()
        disable_created_metrics()  # type: ignore[no-untyped-call]  # the library's gap
        self._with_suffix: set[str] = set()

    def counter(self, name: str, text: str, labels: Sequence[str]) -> Counter:
        """Make a counter that is shown under this very name.

        Raises:
            ValueError: Prometheus cannot carry the name or a label, or the name is taken.
        """
        check_names(name, labels)
        counter = Counter(name, text, labels, registry=self)
        if name.endswith(_SUFFIX):
            self._with_suffix.add(name)
        return counter

    def make(
        self, kind: str, name: str, text: str, labels: Sequence[str], buckets: Sequence[float]
    ) -> MetricWrapperBase:
        """Make a counter, gauge or histogram; ``buckets`` are for the last.

        Raises:
            ValueError: As `counter`; or there is no such kind.
        """
        if kind == "counter":
            return self.counter(name, text, labels)
        check_names(name, labels)
        if kind == "gauge":
            return Gauge(name, text, labels, registry=self)
        if kind == "histogram":
            return Histogram(name, text, labels, registry=self, buckets=buckets)
        raise ValueError(f"{kind!r} is no kind of metric")

    def families(self) -> Iterator[tuple[str, Metric, list[tuple[str, Sample]]]]:
        """All metrics: the name it is shown under, the metric, its samples and their names."""
        for family in self.collect():
            strip = family.type == "counter" and family.name + _SUFFIX not in self._with_suffix
            shown = family.name
            if family.type == "counter" and not strip:
                shown += _SUFFIX
            samples = [
                (one.name.removesuffix(_SUFFIX) if strip else one.name, one)
                for one in family.samples
            ]
            yield shown, family, samples


def check_names(name: str, labels: Sequence[str]) -> None:
    """Refuse names that this text format cannot carry; the library lets any UTF-8 pass.

    Raises:
        ValueError: It cannot carry one of them.
    """
    if not _METRIC_NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name for a metric")
    for label in labels:
        if not _LABEL_NAME.fullmatch(label):
            raise ValueError(f"{label!r} is no name for a label")


def render(
    registry: Registry,
    only: Collection[str] = (),
    is_shown: Callable[[str], bool] = lambda _name: True,
) -> str:
    """All metrics as text.

    Args:
        registry: Where they are.
        only: Names of samples; with any, no others are shown.
        is_shown: Whether the metric of a name may be shown.
    """
    return "".join(_lines(registry, frozenset(only), is_shown))


def java_number(value: float) -> str:
    """A finite number as Java's ``Double.toString`` shows it: ``75.0``, ``1.2E7``, ``1.0E-4``."""
    if value == 0 or 1e-3 <= abs(value) < 1e7:
        return repr(float(value))
    sign, digits, exponent = Decimal(repr(value)).normalize().as_tuple()
    assert isinstance(exponent, int)  # the number is finite
    first, *others = map(str, digits)
    power = exponent + len(others)
    return f"{'-' if sign else ''}{first}.{''.join(others) or '0'}E{power}"


def _lines(
    registry: Registry, only: frozenset[str], is_shown: Callable[[str], bool]
) -> Iterator[str]:
    for shown, family, samples in registry.families():
        if not is_shown(shown):
            continue
        wanted = [(name, one) for name, one in samples if not only or name in only]
        if only and not wanted:
            continue
        yield f"# HELP {shown} {_escape(family.documentation)}\n"
        yield f"# TYPE {shown} {family.type}\n"
        for name, sample in wanted:
            labels = sample.labels
            if family.type == "histogram" and "le" in labels:
                labels = {**labels, "le": _number(float(labels["le"]))}
            yield f"{name}{_braced(labels)} {_number(sample.value)}\n"


def _braced(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    pairs = (f'{key}="{_quote(value)}",' for key, value in labels.items())
    return f"{{{''.join(pairs)}}}"


def _number(value: float) -> str:
    if math.isfinite(value):
        return java_number(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


def _quote(text: str) -> str:
    return _escape(text).replace('"', r"\"")
