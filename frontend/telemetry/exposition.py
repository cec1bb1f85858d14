"""The page of metrics in Prometheus' text format 0.0.4, as TorchServe's Java client writes it.

Scripts compare the text: a comma follows the last label, numbers have Java's format, and a counter
has the suffix ``_total`` only if its name has. prometheus_client writes neither.

A client that prefers OpenMetrics 1.0, as Prometheus does, gets the same samples in that format,
with the exemplars of histograms. What OpenMetrics does not allow as a counter or histogram, such
as a counter without the suffix ``_total``, has the type unknown there, which keeps its names.
"""

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from itertools import islice
from typing import TypeVar

from marserve.frontend.aio.long_work import Steps
from marserve.frontend.telemetry.series import Family, Labels, Registry, WatchedGauge

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
# The names that a family of OpenMetrics occupies besides those of its samples.
_OCCUPIED = {"counter": ("", "_created"), "histogram": ("_created",)}

# The name of a sample, its labels and its value.
_Row = tuple[str, Labels, float]
_R = TypeVar("_R", _Row, tuple[str, str])


def prefers_openmetrics(accept: str) -> bool:
    """Return whether a header ``Accept`` names OpenMetrics, and no less than ``text/plain``."""
    weights = {"application/openmetrics-text": 0.0, "text/plain": 0.0}
    for item in accept.lower().split(","):
        media, *parameters = (part.strip() for part in item.split(";"))
        given = dict(parameter.partition("=")[::2] for parameter in parameters)
        if media in weights:
            try:
                weights[media] = max(weights[media], float(given.get("q", 1)))
            except ValueError:
                continue
    openmetrics, text = weights.values()
    return openmetrics > 0 and openmetrics >= text


_MAX_EXEMPLAR = 128  # characters of its labels
_LINES = 256  # that are written in one step


def render(
    registry: Registry,
    only: Collection[str] = (),
    includes: Callable[[str], bool] = lambda _name: True,
    relayed: Iterable[str] = (),
) -> Steps[bytearray]:
    """Return the metrics for which ``includes`` is true as text, then the lines ``relayed``.

    If ``only`` contains names, return only the samples with these names.
    """
    page = bytearray()
    for metric in registry:
        if not includes(metric.name):
            continue
        samples = yield from _samples(metric, only)
        if samples or not only:
            page += f"# HELP {metric.name} {_escape(metric.help)}\n".encode()
            page += f"# TYPE {metric.name} {metric.kind}\n".encode()
        lines = (f"{name}{_braced(labels)} {_number(value)}\n" for name, labels, value in samples)
        yield from _write(page, lines)
    yield from _write(page, relayed)
    return page


def render_openmetrics(
    registry: Registry,
    only: Collection[str] = (),
    includes: Callable[[str], bool] = lambda _name: True,
    relayed: Iterable[str] = (),
) -> Steps[bytearray]:
    """Return what `render` does in OpenMetrics 1.0."""
    taken, page = set(registry.sample_names), bytearray()
    for metric in registry:
        if not includes(metric.name):
            continue
        samples = yield from _samples(metric, only)
        family = metric.name.removesuffix("_total") if metric.kind == "counter" else metric.name
        occupied = {family + suffix for suffix in _OCCUPIED.get(metric.kind, ())}
        exemplars = dict[Labels, str]()
        blocks: list[tuple[str, str, list[_Row]]]
        if not only and taken.isdisjoint(occupied) and _has_valid_type(metric, samples):
            taken |= occupied
            blocks = [(family, metric.kind, samples)]
            if isinstance(metric, Family):
                exemplars = yield from _exemplars(metric)
        else:
            blocks = [(name, "unknown", rows) for name, rows in _by_name(samples)]
        for name, kind, block in blocks:
            page += f"# HELP {name} {quote(metric.help)}\n# TYPE {name} {kind}\n".encode()
            yield from _write(page, _openmetrics_lines(block, exemplars))
    for name, lines in _by_name((line.partition("{")[0], line) for line in relayed):
        page += f"# TYPE {name} unknown\n".encode()
        yield from _write(page, (line for _, line in lines))
    page += b"# EOF\n"
    return page


def _openmetrics_lines(rows: Sequence[_Row], exemplars: Mapping[Labels, str]) -> Iterator[str]:
    for name, labels, value in rows:
        end = exemplars.get(labels, "")
        yield f"{name}{_braced(labels, _bound, '')} {_number(value)}{end}\n"


def _write(page: bytearray, lines: Iterable[str]) -> Steps[None]:
    left = iter(lines)
    while some := "".join(islice(left, _LINES)):
        text = some.encode("utf-8", "replace")
        page += text
        yield len(text)


def java_number(value: float) -> str:
    """Format a finite number as Java's ``Double.toString``: ``75.0``, ``1.2E7``, ``1.0E-4``."""
    if value == 0 or 1e-3 <= abs(value) < 1e7:
        return repr(float(value))
    sign, digits, exponent = Decimal(repr(value)).normalize().as_tuple()
    assert isinstance(exponent, int)  # the number is finite
    first, *others = map(str, digits)
    power = exponent + len(others)
    return f"{'-' if sign else ''}{first}.{''.join(others) or '0'}E{power}"


def _samples(metric: Family | WatchedGauge, only: Collection[str]) -> Steps[list[_Row]]:
    rows = list[_Row]()
    for place, (suffix, labels, value) in enumerate(metric.samples(), start=1):
        name = metric.name + suffix
        if not only or name in only:
            rows.append((name, labels, value))
        if place % _LINES == 0:
            yield 0
    return rows


def _by_name(rows: Iterable[_R]) -> list[tuple[str, list[_R]]]:
    """Return the rows grouped by their first item."""
    groups = dict[str, list[_R]]()
    for row in rows:
        groups.setdefault(row[0], []).append(row)
    return list(groups.items())


def _has_valid_type(metric: Family | WatchedGauge, samples: list[_Row]) -> bool:
    """Return whether OpenMetrics allows these samples for a metric of this type."""
    if metric.kind == "gauge":
        return True
    if metric.kind == "counter" and not metric.name.endswith("_total"):
        return False
    # A handler's histogram may count negative values, and any of its metrics NaN.
    bounds = metric.declared.buckets if isinstance(metric, Family) else ()
    return all(value >= 0 for _, _, value in samples) and (
        metric.kind == "counter" or bounds[0] >= 0
    )


def _exemplars(metric: Family) -> Steps[dict[Labels, str]]:
    """Return the text of the exemplars, by the labels of their buckets."""
    # Rounded, so that an exemplar has the same time at each reading: else it would be a new one.
    epoch = round(time.time() - time.monotonic(), 1)
    found = dict[Labels, str]()
    for place, (labels, exemplar, value) in enumerate(metric.exemplars(), start=1):
        ids: Labels = (("request_id", str(exemplar[0])),)
        if trace_id := getattr(exemplar, "trace_id", None):
            ids = (*ids, ("trace_id", str(trace_id)))
        # The id of a workflow's node may be long.
        if sum(len(name) + len(str(text)) for name, text in ids) <= _MAX_EXEMPLAR:
            answered = getattr(exemplar, "answered", None)
            moment = "" if answered is None else f" {epoch + answered:.3f}"
            found[labels] = f" # {_braced(ids, end='')} {_number(value)}{moment}"
        if place % _LINES == 0:
            yield 0
    return found


def _number(value: float) -> str:
    if math.isfinite(value):
        return java_number(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


def _bound(value: float) -> str:
    """Format a bucket's bound in OpenMetrics' canonical way, as Go does."""
    if math.isinf(value):
        return "+Inf"
    if value < 1e6:
        return repr(float(value))
    digits = Decimal(repr(value)).normalize().as_tuple().digits
    return f"{value:.{len(digits) - 1}e}"


def _braced(labels: Labels, number: Callable[[float], str] = _number, end: str = ",") -> str:
    pairs = (
        f'{key}="{quote(value) if isinstance(value, str) else number(value)}"'
        for key, value in labels
    )
    return f"{{{','.join(pairs)}{end}}}" if labels else ""


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


def quote(text: str) -> str:
    """Return the text of a label's value."""
    return _escape(text).replace('"', r"\"")
