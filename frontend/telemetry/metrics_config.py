"""metrics.yaml: which metrics are reported, of which type, and how they are labelled.

The file of key ``metrics_config``, or the built-in one beside this module. If the file cannot be
used, that is logged and the built-in one taken, because metrics are no reason to stop serving
(TorchServe failed every worker). An entry that cannot be used is logged and left out.

A metric that handlers report and nobody declared is left out and logged once, unless
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

logger = logging.getLogger(__name__)

KINDS = ("counter", "gauge", "histogram")
#: The default of a histogram, in the metric's own unit.
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
#: The label that handlers' metrics get without declaring it.
HOSTNAME = "Hostname"

_BUILT_IN = Path(__file__).with_name("metrics.yaml")
_METRIC_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL_NAME = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")


class MetricsConfigError(Exception):
    """A metrics.yaml that cannot be used, or an entry of it."""


@dataclass(frozen=True)
class Declared:
    """One metric."""

    kind: str  # one of `KINDS`
    name: str
    unit: str  # any text; part of the log line and of the help
    dimensions: tuple[str, ...]  # names of its labels, in the order of their values
    buckets: tuple[float, ...] = BUCKETS  # upper bounds, of a histogram
    text: str = ""  # its help; TorchServe's words where empty

    @property
    def help(self) -> str:
        """The text of its HELP line."""
        return self.text or f"Torchserve prometheus {self.kind} metric with unit: {self.unit}"


def unfit_name(declared: Declared) -> str:
    """Why the text format of Prometheus cannot carry a metric; empty where it can."""
    if not _METRIC_NAME.fullmatch(declared.name):
        return f"{declared.name!r} is no name for a metric"
    for label in declared.dimensions:
        if not _LABEL_NAME.fullmatch(label) or (declared.kind, label) == ("histogram", "le"):
            return f"{label!r} is no name for a label"
        if declared.dimensions.count(label) > 1:  # the whole page would be unreadable
            return f"the label {label!r} stands there twice"
    return ""


@dataclass(frozen=True)
class MetricsConfig:
    """What a metrics.yaml declares, by name."""

    ts: Mapping[str, Declared]  # the server's metrics
    model: Mapping[str, Declared]  # the handlers'; their last dimension is the host name
    keeps_undeclared: bool = False  # whether handlers' metrics beyond these are reported

    @property
    def declarations(self) -> list[list[Any]]:
        """The handlers' metrics as they are sent to workers: see `marserve.backend.metrics`."""
        return [
            [declared.kind, declared.name, declared.unit, list(declared.dimensions[:-1])]
            for declared in self.model.values()
        ]


def load_metrics_config(path: Path | None = None, *, auto_detect: bool = False) -> MetricsConfig:
    """Read a metrics.yaml; the built-in one if there is no path or the file cannot be used."""
    built_in = parse_metrics_config(_BUILT_IN.read_bytes())
    config = built_in
    if path is not None:
        try:
            config = _fit(parse_metrics_config(_read(path)), built_in)
        except (OSError, MetricsConfigError) as error:
            logger.error("%s: %s The built-in metrics are reported instead.", path, error)  # noqa: TRY400 - in full
    if not auto_detect:
        return config
    # Those of the worker itself need no declaration either.
    return MetricsConfig(config.ts, {**built_in.model, **config.model}, keeps_undeclared=True)


def parse_metrics_config(text: bytes) -> MetricsConfig:
    """Read the text of a metrics.yaml.

    Raises:
        MetricsConfigError: It is no yaml, or not of the shape.
    """
    try:
        document = load_yaml(text)
    except YamlTooLarge as error:
        raise MetricsConfigError(f"It {error}.") from error
    except Exception as error:  # the user's file meets the parser's every corner
        raise MetricsConfigError(f"It is no yaml ({' '.join(str(error).split())}).") from error
    sections = _mapping(document, "The file")
    ts = {declared.name: declared for declared in _section(sections, "ts_metrics")}
    if sections.get("model_metrics") is None:
        raise MetricsConfigError("It has no section model_metrics.")
    model = {
        declared.name: _with_hostname(declared) for declared in _section(sections, "model_metrics")
    }
    return MetricsConfig(ts, model)


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MAX_BYTES + 1)


def _section(sections: Mapping[str, Any], name: str) -> Iterator[Declared]:
    section = sections.get(name)
    for kind, entries in _mapping({} if section is None else section, name).items():
        if kind not in KINDS:
            key = repr(kind) if isinstance(kind, str) else "a key"  # a number may be endless
            raise MetricsConfigError(f"{name} has {key}, which is none of {', '.join(KINDS)}.")
        if entries is not None and not isinstance(entries, list):
            raise MetricsConfigError(f"{kind} of {name} is no list.")
        for entry in entries or ():
            yield _declared(kind, _mapping(entry, f"An entry of {kind} in {name}"))


def _declared(kind: str, entry: Mapping[str, Any]) -> Declared:
    name, unit, dimensions = entry.get("name"), entry.get("unit"), entry.get("dimensions")
    if not isinstance(name, str) or not name:
        raise MetricsConfigError(f"A {kind} has no name.")
    if not isinstance(unit, str) or not unit:
        raise MetricsConfigError(f"{name} has no unit.")
    if not isinstance(dimensions, list) or not all(isinstance(label, str) for label in dimensions):
        raise MetricsConfigError(f"The dimensions of {name} are no list of names.")
    return Declared(kind, name, unit, tuple(dimensions), _buckets(name, entry.get("buckets")))


def _buckets(name: str, buckets: Any) -> tuple[float, ...]:
    if buckets is None:
        return BUCKETS
    if isinstance(buckets, list) and buckets and all(map(_is_bound, buckets)):
        bounds = [float(bound) for bound in buckets]
        if all(low < high for low, high in itertools.pairwise(bounds)):
            return tuple(bounds)
    raise MetricsConfigError(f"The buckets of {name} are no list of growing numbers.")


def _is_bound(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) <= sys.float_info.max


def _mapping(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise MetricsConfigError(f"{what} is no mapping.")
    return value


def _with_hostname(declared: Declared) -> Declared:
    names = [name for name in declared.dimensions if name != HOSTNAME]
    return replace(declared, dimensions=(*names, HOSTNAME))


def _fit(config: MetricsConfig, built_in: MetricsConfig) -> MetricsConfig:
    """Leave out what the server cannot report, and log it.

    Names of handlers' metrics may be any text: what Prometheus cannot carry still has its log.
    """

    def fits(declared: Declared, known: Declared | None, unfit: str = "") -> bool:
        if len(set(declared.dimensions)) < len(declared.dimensions):
            unfit = "a dimension stands there twice"
        elif known is not None and len(known.dimensions) != len(declared.dimensions):
            unfit = f"its {len(known.dimensions)} dimensions are {', '.join(known.dimensions)}"
        if unfit:
            logger.error("metrics_config: %s is left out: %s.", declared.name, unfit)
        return not unfit

    server, handlers = config.ts.items(), config.model.items()
    ts = {
        name: metric
        for name, metric in server
        if fits(metric, built_in.ts.get(name), unfit_name(metric))
    }
    model = {name: metric for name, metric in handlers if fits(metric, built_in.model.get(name))}
    for name in ts.keys() & model.keys():
        logger.error("metrics_config: %s of model_metrics is left out: the server has it.", name)
        del model[name]
    return MetricsConfig(ts, model)
