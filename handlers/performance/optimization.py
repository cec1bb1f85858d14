"""The section ``optimization`` of model-config.yaml.

    optimization:
      precision: bf16               # fp32 | bf16 | fp16
      cast: all                     # all: weights and activations; matmul: those of products only
      channels_last: true
      fold_batch_norm: true
      cuda_graphs: true
      device_stages: ["cuda:0", "cuda:1"]
      check_accuracy: {max_relative_error: 0.02, min_agreement: 0.99, samples: [a.jpg, b.jpg]}

An option that is not possible fails the load.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch

from marserve.backend.errors import OptionRefused

SECTION = "optimization"

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class AccuracyGoal:
    """The accepted difference to the model in fp32 (`performance.accuracy`)."""

    max_relative_error: float | None = None
    min_agreement: float | None = None
    samples: tuple[str, ...] = ()  # files of the archive; if empty, the sample input


@dataclass(frozen=True, kw_only=True)
class Optimization:
    """The options of the section; the defaults change nothing."""

    precision: str = "fp32"
    cast: str = "all"  # or "matmul"
    channels_last: bool = False
    fold_batch_norm: bool = False
    cuda_graphs: bool = False
    device_stages: tuple[torch.device, ...] = ()
    check_accuracy: AccuracyGoal | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The precision as torch's type."""
        return _DTYPES[self.precision]

    @property
    def matmul_only(self) -> bool:
        """Whether only multiplications have the precision."""
        return self.cast == "matmul"

    @property
    def is_low(self) -> bool:
        """Whether the precision is lower than fp32."""
        return self.precision != "fp32"

    def described(self) -> dict[str, Any]:
        """Return the options by name as JSON values, without `check_accuracy`."""
        options = {each.name: getattr(self, each.name) for each in fields(self)}
        del options["check_accuracy"]
        return {**options, "device_stages": list(map(str, self.device_stages))}


def read_optimization(config: Mapping[str, Any]) -> Optimization | None:
    """Read the section of a parsed model-config.yaml, or raise OptionRefused; None without it."""
    section = config.get(SECTION)
    if section is None:
        return None
    values = _known(section, SECTION, _READERS)
    if values.get("cast") == "matmul" and values.get("precision", "fp32") == "fp32":
        raise OptionRefused(f"{SECTION}.cast: matmul needs precision bf16 or fp16.")
    if values.get("cuda_graphs") and values.get("device_stages"):
        raise OptionRefused(f"{SECTION}: cuda_graphs and device_stages exclude each other.")
    return Optimization(**values)


def _known(section: Any, path: str, readers: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(section, dict):
        raise OptionRefused(f"{path} takes a mapping of {', '.join(readers)}, not {section!r}.")
    values = {}
    for key, value in section.items():
        if key not in readers:
            raise OptionRefused(f"{path} has no {key!r}; it has {', '.join(readers)}.")
        values[key] = readers[key](value, f"{path}.{key}")
    return values


def _flag(value: Any, path: str) -> bool:
    if not isinstance(value, bool):
        raise OptionRefused(f"{path} takes true or false, not {value!r}.")
    return value


def _one_of(choices: Collection[str], value: Any, path: str) -> str:
    if value not in choices:
        raise OptionRefused(f"{path} is one of {', '.join(choices)}, not {value!r}.")
    return str(value)


def _devices(value: Any, path: str) -> tuple[torch.device, ...]:
    if not isinstance(value, list) or len(value) < 2:
        raise OptionRefused(f"{path} takes a list of two or more devices, not {value!r}.")
    try:
        return tuple(torch.device(name) for name in value)
    except (RuntimeError, TypeError):
        raise OptionRefused(f"{path} contains an unknown device: {value!r}.") from None


def _goal(value: Any, path: str) -> AccuracyGoal:
    if isinstance(value, dict):
        goal = AccuracyGoal(**_known(value, path, _GOAL_READERS))
    else:
        goal = AccuracyGoal(max_relative_error=_part(value, path))
    if goal.max_relative_error is None and goal.min_agreement is None:
        raise OptionRefused(f"{path} needs max_relative_error or min_agreement.")
    return goal


def _part(value: Any, path: str) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= 1:
        raise OptionRefused(f"{path} takes a number from 0 to 1, not {value!r}.")
    return float(value)


def _files(value: Any, path: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
        raise OptionRefused(f"{path} takes a list of files, not {value!r}.")
    return tuple(value)


_READERS = {
    "precision": partial(_one_of, tuple(_DTYPES)),
    "cast": partial(_one_of, ("all", "matmul")),
    "channels_last": _flag,
    "fold_batch_norm": _flag,
    "cuda_graphs": _flag,
    "device_stages": _devices,
    "check_accuracy": _goal,
}
_GOAL_READERS = {
    "max_relative_error": _part,
    "min_agreement": _part,
    "samples": _files,
}
