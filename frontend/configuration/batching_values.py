"""The fields of batching as users write them down: their names, and what each may be.

One table for all places: a request, model-config.yaml, ``models=`` and a snapshot. What a field
says is given in attributes of `batching.options.Batching`, times in seconds. Whether fields agree
with each other is said there.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from marserve.frontend.configuration.repr_limits import shown

#: How requests become batches; TorchServe's way is the first.
BATCH_POLICIES = ("fixed", "greedy", "adaptive", "fixed_or_single")
#: In the place of a size: one that is found by measuring.
AUTOMATIC = "auto"

#: Attributes of `Batching`, those that somebody mentioned.
Fields = Mapping[str, Any]
Read = Callable[[Any], dict[str, Any]]
#: Is told name, value and rule of what cannot be used; counts as absent where it returns.
OnWrong = Callable[[str, object, str], None]

_PRIORITIES = ("high", "normal", "low")
_MOST = 2**31 - 1  # a Java int
# More sizes than anybody compiles: each is tried when the model is loaded.
_MOST_SIZES = 64


@dataclass(frozen=True)
class BatchingField:
    """One field.

    Attributes:
        parameter: Its name in a request, and wherever people are told about it.
        key: Its name in yaml and JSON.
        read: A yaml or JSON value to attributes of `Batching`; raises ValueError with the rule.
        other_parameter: Its name in another server, in a request; empty for none.
        other_key: The same in yaml and JSON.
    """

    parameter: str
    key: str
    read: Read
    other_parameter: str = ""
    other_key: str = ""

    @property
    def parameters(self) -> tuple[str, ...]:
        """All its names in a request."""
        return tuple(filter(None, (self.parameter, self.other_parameter)))

    @property
    def keys(self) -> tuple[str, ...]:
        """All its names in yaml and JSON."""
        return tuple(filter(None, (self.key, self.other_key)))


def _is_whole(value: object, minimum: int) -> bool:
    return type(value) is int and minimum <= value <= _MOST


def _size(value: Any) -> dict[str, Any]:
    if value == AUTOMATIC:
        return {"is_automatic": True}
    if not _is_whole(value, 1):
        raise ValueError(f"a whole number, 1 or more, or {AUTOMATIC}")
    return {"size": value, "is_automatic": False}


def _whole(attribute: str, minimum: int) -> Read:
    def read(value: Any) -> dict[str, Any]:
        if not _is_whole(value, minimum):
            raise ValueError(f"a whole number, {minimum} or more")
        return {attribute: value}

    return read


def _milliseconds(attribute: str) -> Read:
    def read(value: Any) -> dict[str, Any]:
        return {attribute: _whole(attribute, 0)(value)[attribute] / 1000}

    return read


def _flag(attribute: str) -> Read:
    def read(value: Any) -> dict[str, Any]:
        if type(value) is not bool:
            raise ValueError("true or false")
        return {attribute: value}

    return read


def _policy(value: Any) -> dict[str, Any]:
    if not isinstance(value, str) or value not in BATCH_POLICIES:
        raise ValueError(f"one of {', '.join(BATCH_POLICIES)}")
    return {"policy": value}


def _sizes(value: Any) -> dict[str, Any]:
    is_list = isinstance(value, list) and len(value) <= _MOST_SIZES
    if not is_list or not all(_is_whole(one, 1) for one in value):
        raise ValueError("a list of whole numbers, rising, each 1 or more; empty for any size")
    return {"compiled_sizes": tuple(value)}


def _queue(value: Any) -> dict[str, Any]:
    return {**_whole("queue_size", 1)(value), "is_queue_bounded": True}


def _seats(value: Any) -> dict[str, Any]:
    is_map = isinstance(value, dict) and all(key in _PRIORITIES for key in value)
    if not is_map or not all(_is_whole(seats, 1) for seats in value.values()):
        raise ValueError(f"a map of {', '.join(_PRIORITIES)} to whole numbers, 1 or more")
    return {"seats": dict(value)}


#: Those that requests may have, too, and that can be changed while a model is served.
LIVE_FIELDS = (
    BatchingField("batch_size", "batchSize", _size, "max_batch_size", "maxBatchSize"),
    BatchingField("max_batch_delay", "maxBatchDelay", _milliseconds("delay")),
    BatchingField("batch_policy", "batchPolicy", _policy),
    BatchingField("max_latency_ms", "maxLatencyMs", _milliseconds("max_latency")),
    BatchingField("num_requests", "numRequests", _whole("num_requests", 0)),
    BatchingField("compiled_batch_sizes", "compiledBatchSizes", _sizes),
    BatchingField("job_queue_size", "jobQueueSize", _queue),
)
FIELDS = (
    *LIVE_FIELDS,
    BatchingField("priority_queue_sizes", "priorityQueueSizes", _seats),
    BatchingField("isolate_failures", "isolateFailures", _flag("isolates")),
    BatchingField("retry_on_worker_death", "retryOnWorkerDeath", _flag("retries")),
    BatchingField("dynamic_batch_size", "dynamicBatchSize", _flag("splits_lists")),
)
#: Every name in yaml and JSON, and what reads it.
READERS: Mapping[str, Read] = {key: one.read for one in FIELDS for key in one.keys}


def refuse_value(name: str, value: object, rule: str) -> NoReturn:
    """Say what is wrong with a value.

    Raises:
        ValueError: Always; names field, value and rule.
    """
    told = value[:80] if isinstance(value, str) else shown(value)
    raise ValueError(f"{name}={told}: it is {rule}.")


def read_keys(values: Mapping[str, Any], on_wrong: OnWrong = refuse_value) -> dict[str, Any]:
    """Reads all fields of a yaml or JSON object.

    Args:
        values: By key; null counts as absent.
        on_wrong: Told of a value that cannot be used.

    Raises:
        ValueError: Two names of a field say different things.
    """
    found: dict[str, Any] = {}
    for one in FIELDS:
        found |= read_field(one.read, one.keys, values, on_wrong)
    return found


def read_field(
    read: Read, names: Iterable[str], values: Mapping[str, Any], on_wrong: OnWrong = refuse_value
) -> Fields:
    """What one field says, under whichever of its names; empty where it says nothing.

    Raises:
        ValueError: Two names say different things.
    """
    said: dict[str, Fields] = {}
    for name in names:
        value = values.get(name)
        if value is not None:
            try:
                said[name] = read(value)
            except ValueError as error:
                on_wrong(name, value, str(error))
    first, *others = said.values() or ({},)
    if any(other != first for other in others):
        raise ValueError(f"{' and '.join(said)} are names of the same thing, and differ.")
    return first
