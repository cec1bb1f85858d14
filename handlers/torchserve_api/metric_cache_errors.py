"""What reading a metrics.yaml, or a call with wrong arguments, may raise: TorchServe's names."""

import yaml

from marserve.backend.errors import (
    MetricsCacheKeyError,
    MetricsCacheTypeError,
    MetricsCacheValueError,
)

__all__ = [
    "GeneralMetricsCacheError",
    "MetricsCacheIOError",
    "MetricsCacheKeyError",
    "MetricsCachePyYamlError",
    "MetricsCacheTypeError",
    "MetricsCacheValueError",
]


class GeneralMetricsCacheError(Exception):
    """Anything else."""


class MetricsCacheIOError(OSError):
    """The file cannot be read."""


class MetricsCachePyYamlError(yaml.YAMLError):
    """The file is not YAML."""
