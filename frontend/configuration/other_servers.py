"""The batching settings of other servers: their meaning here, or our name for them.

A foreign setting sets values of our settings. In one source, our settings take precedence over
foreign ones, and a specific foreign setting over a general one. Of several sources with foreign
settings, only those of the strongest one count.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from marserve.frontend.configuration.setting import Fields, rows_of, setting
from marserve.frontend.configuration.setting_kinds import FLAG, Kind, word

LATENCY, THROUGHPUT = "latency", "throughput"
# OpenVINO's AUTO: throughput of all devices; here, of all workers.
_CUMULATIVE = "cumulative_throughput"
# As in OpenVINO, in any case of letters.
_HINTS = word(LATENCY, THROUGHPUT, _CUMULATIVE, "none", "undefined", any_case=True)


def _foreign(key: str, kind: Kind, text: str, other_key: str = "") -> Any:
    sources = ("request", "yaml", "models")
    more: dict[str, Any] = {"is_live": True, "is_strict": True, "other_key": other_key}
    return setting(key, kind, None, text, sources, **more)


@dataclass(frozen=True, kw_only=True)
class ForeignValues:
    """The settings of other servers; None: not set."""

    performance_hint: str | None = _foreign(
        "performanceHint",
        _HINTS,
        "OpenVINO's: sets what no other setting sets; see docs/batching.md.",
        "performanceMode",
    )
    allow_auto_batching: bool | None = _foreign(
        "allowAutoBatching",
        FLAG,
        "OpenVINO's: false is a batch size of 1 unless one is set, true the default.",
    )
    batchable: bool | None = _foreign(
        "batchable", FLAG, "BentoML's: true is the adaptive policy, false a batch size of 1."
    )


FOREIGN_SETTINGS = rows_of(ForeignValues)

_ADAPTIVE: Fields = {"policy": "adaptive"}
_ONE: Fields = {"size": 1, "is_automatic": False}
# By value; the most general first.
_MEANINGS: Mapping[str, Mapping[Any, Fields]] = {
    "performance_hint": {
        # No request waits; a batch is the requests that arrived while the worker was busy.
        LATENCY: {**_ADAPTIVE, "delay": 0.0},
        THROUGHPUT: {**_ADAPTIVE, "is_automatic": True},
        _CUMULATIVE: {**_ADAPTIVE, "is_automatic": True},
    },
    "allow_auto_batching": {False: _ONE},
    "batchable": {True: _ADAPTIVE, False: _ONE},
}
#: The attributes of foreign settings.
FOREIGN = frozenset(_MEANINGS)


def meanings(values: Fields) -> Iterator[tuple[str, Fields]]:
    """Yield each foreign setting among values, and what it sets; the strongest last."""
    for name, by_value in _MEANINGS.items():
        if name in values:
            yield name, by_value.get(values[name], {})


_DELAY = "here it is max_batch_delay, in milliseconds"
_QUEUE = "here it is job_queue_size, in requests"
_SIZES = "batch_policy=adaptive finds the sizes itself"
_WORKERS = "here it is the number of workers: initial_workers, or min_worker and max_worker"
#: BentoML's section in model-config.yaml; its members, and our keys.
SECTION = "batching"
BATCHING_SECTION = {
    "enabled": "batchable",
    "max_batch_size": "maxBatchSize",
    "max_latency_ms": "maxLatencyMs",
}
#: What names the device of OpenVINO's automatic batching; handlers have such a key, too.
DEVICE = "device"
BATCH_DEVICE = (
    "here BATCH:GPU(4) is batch_size=4 with batch_policy=fixed_or_single, and BATCH:GPU is "
    "batch_size=auto"
)
#: Names whose values have no direct equivalent, and the hint for each.
FOREIGN_NAMES = {
    "allowed_batch_sizes": "here it is compiled_batch_sizes",
    "auto_batch_device": BATCH_DEVICE,
    "auto_batch_timeout": f"{_DELAY}; 0, no batches, is batch_size=1",
    "batch_padding_policy": "with compiled_batch_sizes the cheaper of padding and cutting is used",
    "batch_timeout_micros": _DELAY,
    SECTION: "here its keys are batchable, max_batch_size and max_latency_ms",
    "dynamic_batching": "here it is batch_policy, with batch_size and max_batch_delay",
    "instance_group": _WORKERS,
    "max_concurrency": _QUEUE,
    "max_enqueued_batches": _QUEUE,
    "max_queue_delay_microseconds": _DELAY,
    "max_queue_size": _QUEUE,
    "nireq": "here it is num_requests",
    "num_batch_threads": _WORKERS,
    "num_streams": _WORKERS,
    "performance_hint_num_requests": "here it is num_requests",
    "preferred_batch_size": _SIZES,
    "runners": "here they are batchSize, maxLatencyMs, minWorkers and maxWorkers",
    "signatures": "here it is batchable, and batchDim in model-config.yaml",
}


def check_foreign(settings: Fields) -> None:
    """Raise ValueError if foreign settings exclude another setting of the same source."""
    is_automatic = settings.get("is_automatic", False)
    if settings.get("batchable") is False and (is_automatic or settings.get("size", 1) > 1):
        raise ValueError("batchable=false is a batch size of 1, but another one is given.")
    if settings.get("allow_auto_batching") is False and is_automatic:
        raise ValueError("allow_auto_batching=false and batch_size=auto contradict each other.")
