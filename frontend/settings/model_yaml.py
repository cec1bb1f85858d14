"""Reads the settings of the server in a model-config.yaml; other keys are the handler's.

A wrong value of a TorchServe key is ignored with a warning, as in TorchServe; a wrong value of our
own keys refuses the model (`Setting.is_strict`).
"""

import itertools
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from marserve.frontend.configuration.model_schema import (
    BATCH_POLICIES,
    BY_KEY,
    SETTINGS,
    TorchRun,
    read_consistent,
)
from marserve.frontend.configuration.other_servers import (
    BATCH_DEVICE,
    BATCHING_SECTION,
    DEVICE,
    SECTION,
)
from marserve.frontend.configuration.setting import (
    Fields,
    Setting,
    read_settings,
    rows_of,
    wrong_value,
)
from marserve.frontend.configuration.setting_kinds import gpu_numbers, short_repr
from marserve.frontend.configuration.unread_keys import YAML_SECTIONS, unread_yaml_key
from marserve.frontend.errors import ArchiveRefused

logger = logging.getLogger(__name__)

#: Called with a warning for the client that registers the model, and for the log.
Warn = Callable[[str], object]

_MAX_KEYS = 500  # that are checked one by one
_TORCHRUN = rows_of(TorchRun)


def log_warning(sentence: str) -> None:
    """Log a warning."""
    logger.warning("%s", sentence)


def yaml_settings(parsed: Mapping[str, Any], gpus: int = 0, warn: Warn = log_warning) -> Fields:
    """Return the settings in a model-config.yaml, on a machine with this number of GPUs.

    Raises:
        ArchiveRefused: A value is wrong, and not ignored.
    """
    on_machine = replace(BY_KEY["deviceIds"], kind=gpu_numbers(gpus))
    rows = [on_machine if row.key == on_machine.key else row for row in SETTINGS]
    on_wrong = partial(_on_wrong, warn)
    try:
        found = dict(read_consistent(rows, _with_section(parsed), on_wrong))
    except ValueError as error:
        raise ArchiveRefused(f"model-config.yaml: {error}") from error
    if "torchrun" in found:
        found["torchrun"] = TorchRun(**read_settings(_TORCHRUN, found["torchrun"], on_wrong))
    return found


def check_yaml(parsed: Mapping[str, Any], settings: Fields, warn: Warn = log_warning) -> None:
    """Warn of keys without effect.

    A key that is not similar to one of ours is ignored, because handlers have their settings here.
    """
    without_effect = {
        "continuousBatching": "every request is sent alone",
        "autoscale": "its requests rarely wait in the queue",
    }
    for key, why in without_effect.items() if settings.get("asynchronous") else ():
        if settings.get(BY_KEY[key].attribute):
            warn(f"model-config.yaml: {key} has no effect beside asyncCommunication: {why}.")
    for key, value in itertools.islice(parsed.items(), _MAX_KEYS):
        if sentence := unread_yaml_key(key):
            warn(f"model-config.yaml: {sentence}")
        if key == DEVICE and isinstance(value, str) and value.startswith("BATCH"):
            warn(f"model-config.yaml: {DEVICE}: {BATCH_DEVICE}.")
    for path in YAML_SECTIONS:
        _check_section(parsed, path, warn)


def _check_section(parsed: Mapping[str, Any], path: str, warn: Warn) -> None:
    """Warn of unknown keys in one of our sections, and of a section that is not a map."""
    found: Any = parsed
    for key in path.split("."):
        found = found.get(key) if isinstance(found, dict) else None
    if isinstance(found, dict):
        for key in itertools.islice(found, _MAX_KEYS):
            if sentence := unread_yaml_key(key, path):
                warn(f"model-config.yaml: {path}: {sentence}")
    elif found is not None and path == SECTION:  # the readers of the others refuse it
        meant = "."
        if isinstance(found, bool):
            meant = f"; did you mean batchable: {str(found).lower()}?"
        elif found in BATCH_POLICIES:
            meant = f"; did you mean batchPolicy: {found}?"
        takes = f"is ignored, it takes a map of {', '.join(YAML_SECTIONS[path])}"
        warn(f"model-config.yaml: {path}={short_repr(found)} {takes}{meant}")


def _with_section(parsed: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a yaml with the members of BentoML's section as keys; ours take precedence.

    A section with none of the members is the handler's.
    """
    section = parsed.get(SECTION)
    if not isinstance(section, dict) or not section.keys() & BATCHING_SECTION:
        return parsed
    if section.get("enabled", True) is False:
        return {"batchable": False, **parsed}
    members = {"enabled": True, **section}
    return {**{key: members.get(name) for name, key in BATCHING_SECTION.items()}, **parsed}


def _on_wrong(warn: Warn, row: Setting, name: str, value: object) -> None:
    if row.is_strict or name != row.key:
        # Values of settings that only the yaml has are shown in Python's format.
        if "models" not in row.sources:
            value = short_repr(value)
        raise ArchiveRefused(f"model-config.yaml: {wrong_value(name, value, row.kind.rule)}")
    rule, maximum = row.kind.rule, row.kind.schema.get("maximum")
    if type(value) is int and maximum and value > maximum:
        rule = f"at most {maximum}"  # the rule may leave it out
    warn(f"model-config.yaml: {name}={short_repr(value)} is ignored, it takes {rule}.")
