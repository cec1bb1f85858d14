"""A registry that keeps names as they are declared, and its text (Prometheus format 0.0.4).

prometheus_client names a counter's samples ``NAME_total``; TorchServe's counters carry the suffix
only where their name has it already (``ts_inference_requests_total``). So the library counts and
collects, and the lines are written here.
"""

import re
from collections.abc import Collection, Iterator, Sequence

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
from prometheus_client.utils import floatToGoString

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


def render(registry: Registry, only: Collection[str] = ()) -> str:
    """All metrics as text; with ``only``, the samples of these names."""
    return "".join(_lines(registry, frozenset(only)))


def _lines(registry: Registry, only: frozenset[str]) -> Iterator[str]:
    for shown, family, samples in registry.families():
        wanted = [(name, one) for name, one in samples if not only or name in only]
        if only and not wanted:
            continue
        yield f"# HELP {shown} {_escape(family.documentation)}\n"
        yield f"# TYPE {shown} {family.type}\n"
        for name, sample in wanted:
            labels = ",".join(f'{key}="{_quote(value)}"' for key, value in sample.labels.items())
            value = floatToGoString(sample.value)  # type: ignore[no-untyped-call]  # the library's gap
            yield f"{name}{{{labels}}} {value}\n"


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


def _quote(text: str) -> str:
    return _escape(text).replace('"', r"\"")
