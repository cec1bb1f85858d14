"""The parameters of batching in a request: what they say, or which of them is wrong.

In a query everything is text, and in JSON clients send numbers as text, too. A text that looks like
a number is one, then; `configuration.batching_values` says what it may be.

A registration has to bear what TorchServe's clients send: a ``batch_size`` or ``max_batch_delay``
that is a text and no number, or that is TorchServe's own default, counts as not given. A change of
a served model was never TorchServe's, and is taken at its word.
"""

import re
from collections.abc import Mapping
from typing import Any

from marserve.frontend.batching.options import Batching
from marserve.frontend.configuration.batching_values import (
    AUTOMATIC,
    LIVE_FIELDS,
    BatchingField,
    Fields,
    read_field,
)
from marserve.frontend.errors import BadRequest
from marserve.frontend.http.parameters import NOT_GIVEN, Parameters

_WHOLE = re.compile(r"[+-]?[0-9]{1,12}")
_LISTED = "compiled_batch_sizes"
# TorchServe's, with the numbers that its clients send for "not given".
_TORCHSERVES = {"batch_size": NOT_GIVEN, "max_batch_delay": (*NOT_GIVEN, -100)}


def registered_batching(parameters: Parameters) -> Fields:
    """What a registration says of batching.

    Raises:
        BadRequest: Something is wrong; names field, value and rule.
    """
    values = _values(parameters)
    for name, not_given in _TORCHSERVES.items():
        if values[name] != AUTOMATIC:
            values[name] = parameters.number(name, not_given)
    return _read(values)


def changed_batching(parameters: Parameters) -> Fields:
    """What is to become of the batching of a model; empty where nothing is said of it.

    Raises:
        BadRequest: Something is wrong; names field, value and rule.
    """
    return _read(_values(parameters))


def told_batching(batching: Batching) -> str:
    """Settings as parameters, for people to read."""
    sizes = ",".join(map(str, batching.compiled_sizes))
    told = {
        "batch_size": AUTOMATIC if batching.is_automatic else batching.size,
        "max_batch_delay": round(batching.delay * 1000),
        "batch_policy": batching.policy,
        "max_latency_ms": round(batching.max_latency * 1000),
        "num_requests": batching.num_requests,
        **({_LISTED: sizes} if sizes else {}),
        "job_queue_size": batching.queue_size,
    }
    return ", ".join(f"{name}={value}" for name, value in told.items())


def _values(parameters: Parameters) -> dict[str, Any]:
    names = [name for one in LIVE_FIELDS for name in one.parameters]
    return {name: _typed(name, parameters.value(name)) for name in names}


def _read(values: Mapping[str, Any]) -> Fields:
    said: dict[str, Any] = {}
    try:
        for one in LIVE_FIELDS:
            said |= _said(one, values)
    except ValueError as error:
        raise BadRequest(str(error)) from error
    return said


def _said(one: BatchingField, values: Mapping[str, Any]) -> Fields:
    return read_field(one.read, one.parameters, values)


def _typed(name: str, value: Any) -> Any:
    """The value that a text stands for; what stands for none is left, for the rules to refuse."""
    if not isinstance(value, str):
        return value
    if name == _LISTED:
        items = value.split(",") if value.strip() else []
        return [_number(one.strip()) for one in items]
    return _number(value.strip())


def _number(text: str) -> int | str:
    return int(text) if _WHOLE.fullmatch(text) else text
