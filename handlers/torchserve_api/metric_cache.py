"""``ts.metrics.metric_cache_yaml_impl``: metrics of a metrics.yaml, without a server.

Tests and programs that run handlers by themselves pass such a cache to the context. Each sample is
logged at once, in the format of TorchServe's worker, which our server reads, too.
"""

import abc
import logging
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from marserve.backend.errors import (
    MetricsCacheKeyError,
    MetricsCacheTypeError,
    MetricsCacheValueError,
)
from marserve.backend.metrics import CachingMetric, MetricsStore, MetricTypes, Row

logger = logging.getLogger(__name__)

_SECTION = "model_metrics"


class GeneralMetricsCacheError(Exception):
    """Another failure; nothing here raises it."""


class MetricsCacheIOError(OSError):
    """The file cannot be read."""


class MetricsCachePyYamlError(yaml.YAMLError):
    """The file is not YAML."""


class _LoggedRows(list[Row]):
    """Logs the samples that are appended, and stays empty."""

    def append(self, row: Row) -> None:
        kind, name, unit, value, pairs, ids = row
        number = int(value) if float(value).is_integer() else value
        dimensions = ",".join(f"{key}:{text}" for key, text in pairs)
        end = ",".join([socket.gethostname(), str(int(time.time())), *ids])
        logger.info(
            "[METRICS]%s.%s:%s|#%s|#type:%s|#hostname:%s",
            name,
            unit,
            number,
            dimensions,
            kind.upper(),
            end,
        )


class MetricCacheAbstract(MetricsStore, abc.ABC):
    """Metrics that are declared in a file, which subclasses read."""

    def __init__(self, config_file_path: str) -> None:
        super().__init__(rows=_LoggedRows())
        self.config_file_path = config_file_path

    @abc.abstractmethod
    def initialize_cache(self) -> None:
        """Create the metrics that the file declares."""


class MetricsCacheYamlImpl(MetricCacheAbstract):
    """Metrics of a metrics.yaml, which the constructor reads."""

    def __init__(self, config_file_path: str) -> None:
        super().__init__(config_file_path)
        if not config_file_path:
            raise MetricsCacheTypeError("Config file not initialized")
        try:
            with Path(config_file_path).open("rb") as file:
                self._parsed_file: Any = yaml.safe_load(file)
        except yaml.YAMLError as error:
            message = f"Error parsing file {config_file_path}: {error}"
            raise MetricsCachePyYamlError(message) from error
        except OSError as error:
            raise MetricsCacheIOError(f"Error reading file {config_file_path}: {error}") from error

    def initialize_cache(self) -> None:
        """Create the metrics of the section ``model_metrics``."""
        if not isinstance(self._parsed_file, dict) or _SECTION not in self._parsed_file:
            raise MetricsCacheKeyError(f"{_SECTION!r} key not found in yaml file")
        section = self._parsed_file[_SECTION]
        if not section:
            raise MetricsCacheValueError(f"Missing `{_SECTION}` specification")
        for kind, declared in section.items():
            try:
                metric_type = MetricTypes(kind)
            except ValueError as error:
                raise MetricsCacheKeyError(f"Invalid metric type: {error}") from error
            for metric in declared or ():
                try:
                    name, unit, names = (metric[key] for key in ("name", "unit", "dimensions"))
                except KeyError as error:
                    raise MetricsCacheKeyError(f"Key not found in cache spec: {error}") from error
                self.add_metric_to_cache(name, unit, names, metric_type)

    def get_metric(
        self, metric_name: str, metric_type: MetricTypes = MetricTypes.COUNTER
    ) -> CachingMetric:
        """Return an existing metric."""
        _check(metric_name, str, "metric_name")
        _check(metric_type, MetricTypes, "metric_type")
        return super().get_metric(metric_name, metric_type)

    def add_metric_to_cache(
        self,
        metric_name: str,
        unit: str,
        dimension_names: Sequence[str] | None = (),
        metric_type: MetricTypes = MetricTypes.COUNTER,
    ) -> CachingMetric:
        """Create a metric, replacing one of that name."""
        _check(unit, str, "unit")
        _check(dimension_names or (), (list, tuple), "dimension_names")
        return super().add_metric_to_cache(metric_name, unit, dimension_names, metric_type)

    def cache_keys(self) -> list[str]:
        """Return ``type:name`` of each metric."""
        return [f"{kind.value}:{name}" for kind, named in self.cache.items() for name in named]


def _check(value: Any, kind: type | tuple[type, ...], name: str) -> None:
    if not isinstance(value, kind):
        raise MetricsCacheTypeError(f"`{name}` cannot be {value!r}")
