"""metrics.yaml: which metrics are reported, of which type, and with which labels.

A file that cannot be used is logged, and the built-in one beside this module is used instead (in
TorchServe every worker failed). An entry that cannot be used is logged and left out.

A metric that handlers report without a declaration is left out and logged once, unless
``model_metrics_auto_detect`` is true: then it has the type, unit and dimensions of its report.
"""

import itertools
import logging
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from marserve.frontend.configuration.bounded_yaml import MAX_BYTES, YamlTooLarge, load_yaml
from marserve.frontend.regular_files import open_file

logger = logging.getLogger(__name__)

KINDS = ("counter", "gauge", "histogram")
#: The default of a histogram, in the metric's own unit.
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
#: The label that is added to handlers' metrics.
HOSTNAME = "Hostname"

_BUILT_IN = Path(__file__).with_name("metrics.yaml")
_METRIC_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL_NAME = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")


class MetricsConfigError(Exception):
    """A metrics.yaml, or an entry of it, cannot be used."""


@dataclass(frozen=True)
class Declared:
    """One metric."""

    kind: str  # one of `KINDS`
    name: str
    unit: str  # any text; part of the log line and of the help
    dimensions: tuple[str, ...]  # names of its labels
    buckets: tuple[float, ...] = BUCKETS  # upper bounds, of a histogram
    text: str = ""  # its help; TorchServe's where empty

    @property
    def help(self) -> str:
        """The text of the HELP line."""
        return self.text or f"Torchserve prometheus {self.kind} metric with unit: {self.unit}"


def counter(name: str, text: str, labels: tuple[str, ...]) -> Declared:
    """Return a counter of the server's own; ``text`` is its help."""
    return Declared("counter", name, "", labels, text=text)


def histogram(
    name: str, text: str, labels: tuple[str, ...], buckets: tuple[float, ...] = BUCKETS
) -> Declared:
    """Return a histogram of the server's own; ``text`` is its help."""
    return Declared("histogram", name, "", labels, buckets, text)


def unfit_name(declared: Declared) -> str:
    """Return why a metric is invalid in the text format of Prometheus; empty if it is valid."""
    if not _METRIC_NAME.fullmatch(declared.name):
        return f"{declared.name!r} is not a valid name of a metric"
    for label in declared.dimensions:
        if not _LABEL_NAME.fullmatch(label) or (declared.kind, label) == ("histogram", "le"):
            return f"{label!r} is not a valid name of a label"
        if declared.dimensions.count(label) > 1:  # Prometheus would refuse the whole page
            return f"it has the label {label!r} twice"
    return ""


@dataclass(frozen=True)
class MetricsConfig:
    """The metrics that a metrics.yaml declares, by name."""

    ts: Mapping[str, Declared]  # the server's metrics
    model: Mapping[str, Declared]  # the handlers'; their last dimension is the host name
    keeps_undeclared: bool = False  # whether others of handlers are reported, too

    @property
    def declarations(self) -> list[list[Any]]:
        """The handlers' metrics in the form that workers receive (`marserve.backend.metrics`)."""
        return [
            [declared.kind, declared.name, declared.unit, list(declared.dimensions[:-1])]
            for declared in self.model.values()
        ]


def load_metrics_config(path: Path | None = None, *, auto_detect: bool = False) -> MetricsConfig:
    """Read a metrics.yaml, or the built-in one without a path or if the file cannot be used."""
    built_in = parse_metrics_config(_BUILT_IN.read_bytes())
    config = built_in
    if path is not None:
        try:
            with open_file(path) as file:
                text = file.read(MAX_BYTES + 1)
            config = _fit(parse_metrics_config(text), built_in)
        except (OSError, MetricsConfigError) as error:
            logger.error("%s: %s The built-in metrics are reported instead.", path, error)  # noqa: TRY400 - in full
    if not auto_detect:
        return config
    # The worker's own metrics need no declaration, either.
    return MetricsConfig(config.ts, {**built_in.model, **config.model}, keeps_undeclared=True)


def parse_metrics_config(text: bytes) -> MetricsConfig:
    """Read the text of a metrics.yaml; raises MetricsConfigError."""
    try:
        document = load_yaml(text)
    except YamlTooLarge as error:
        raise MetricsConfigError(f"It {error}.") from error
    except Exception as error:  # PyYAML raises many kinds
        raise MetricsConfigError(f"It is not yaml ({' '.join(str(error).split())}).") from error
    sections = _mapping(document, "The file")
    ts = {declared.name: declared for declared in _section(sections, "ts_metrics")}
    if sections.get("model_metrics") is None:
        raise MetricsConfigError("It has no section model_metrics.")
    model = {
        declared.name: _with_hostname(declared) for declared in _section(sections, "model_metrics")
    }
    return MetricsConfig(ts, model)


def _section(sections: Mapping[str, Any], name: str) -> Iterator[Declared]:
    section = sections.get(name)
    for kind, entries in _mapping({} if section is None else section, name).items():
        if kind not in KINDS:
            key = repr(kind) if isinstance(kind, str) else "a key"  # a number may be long
            raise MetricsConfigError(f"{name} has {key}, which is not one of {', '.join(KINDS)}.")
        if entries is not None and not isinstance(entries, list):
            raise MetricsConfigError(f"{kind} of {name} is not a list.")
        for entry in entries or ():
            yield _declared(kind, _mapping(entry, f"An entry of {kind} in {name}"))


def _declared(kind: str, entry: Mapping[str, Any]) -> Declared:
    name, unit, dimensions = entry.get("name"), entry.get("unit"), entry.get("dimensions")
    if not isinstance(name, str) or not name:
        raise MetricsConfigError(f"A {kind} has no name.")
    if not isinstance(unit, str) or not unit:
        raise MetricsConfigError(f"{name} has no unit.")
    if not isinstance(dimensions, list) or not all(isinstance(label, str) for label in dimensions):
        raise MetricsConfigError(f"The dimensions of {name} are not a list of names.")
    return Declared(kind, name, unit, tuple(dimensions), _buckets(name, entry.get("buckets")))


def _buckets(name: str, buckets: Any) -> tuple[float, ...]:
    if buckets is None:
        return BUCKETS
    if isinstance(buckets, list) and buckets and all(map(_is_bound, buckets)):
        bounds = [float(bound) for bound in buckets]
        if all(low < high for low, high in itertools.pairwise(bounds)):
            return tuple(bounds)
    raise MetricsConfigError(f"The buckets of {name} are not a list of increasing numbers.")


def _is_bound(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) <= sys.float_info.max


def _mapping(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise MetricsConfigError(f"{what} is not a mapping.")
    return value


def _with_hostname(declared: Declared) -> Declared:
    names = [name for name in declared.dimensions if name != HOSTNAME]
    return replace(declared, dimensions=(*names, HOSTNAME))


def _fit(config: MetricsConfig, built_in: MetricsConfig) -> MetricsConfig:
    """Leave out what the server cannot report, and log it.

    Names of handlers' metrics may be any text: the log contains what Prometheus cannot.
    """

    def fits(declared: Declared, known: Declared | None, unfit: str) -> bool:
        if len(set(declared.dimensions)) < len(declared.dimensions):
            unfit = "it has a dimension twice"
        elif known is not None and len(known.dimensions) != len(declared.dimensions):
            unfit = f"its {len(known.dimensions)} dimensions are {', '.join(known.dimensions)}"
        if unfit:
            logger.error("metrics_config: %s is left out: %s.", declared.name, unfit)
        return not unfit

    ts = {
        name: each
        for name, each in config.ts.items()
        if fits(each, built_in.ts.get(name), unfit_name(each))
    }
    model = {
        name: each
        for name, each in config.model.items()
        if fits(each, built_in.model.get(name), "it is one of ts_metrics" if name in ts else "")
    }
    return MetricsConfig(ts, model)
