"""The batching settings of other servers: their meaning here, or our name for them.

A foreign setting has no value; it sets values of our settings. In one source, our settings take
precedence over foreign ones, and a specific foreign setting over a general one.
"""

from collections.abc import Mapping
from typing import Any

from marserve.frontend.configuration.setting import Fields, Setting, camel_case
from marserve.frontend.configuration.setting_kinds import FLAG, Kind, word

LATENCY, THROUGHPUT = "latency", "throughput"
# OpenVINO's AUTO: throughput of all devices; here, of all workers.
_CUMULATIVE = "cumulative_throughput"
# As in OpenVINO, in any case of letters.
_HINTS = word(LATENCY, THROUGHPUT, _CUMULATIVE, "none", "undefined", any_case=True)
_ADAPTIVE = "adaptive"
_ONE: Fields = {"size": 1, "is_automatic": False}
_HINTED: Mapping[str, Fields] = {
    # No request waits; a batch is the requests that arrived while the worker was busy.
    LATENCY: {"policy": _ADAPTIVE, "delay": 0.0},
    THROUGHPUT: {"policy": _ADAPTIVE, "is_automatic": True},
    _CUMULATIVE: {"policy": _ADAPTIVE, "is_automatic": True},
}


def _foreign(name: str, kind: Kind, text: str, means: Mapping[Any, Fields]) -> Setting:
    return Setting(
        attribute=name,
        key=camel_case(name),
        kind=kind,
        help=text,
        sources=("request", "yaml", "models"),
        name=name,
        parameter=name,
        is_live=True,
        is_strict=True,
        spread=lambda value: means.get(value, {}),
    )


#: The most general first.
FOREIGN_SETTINGS = (
    _foreign(
        "performance_hint",
        _HINTS,
        "OpenVINO's: sets what no other setting sets; see docs/batching.md.",
        _HINTED,
    ),
    _foreign(
        "allow_auto_batching",
        FLAG,
        "OpenVINO's: false is a batch size of 1 unless one is set, true the default.",
        {False: _ONE},
    ),
    _foreign(
        "batchable",
        FLAG,
        "BentoML's: true is the adaptive policy, false a batch size of 1.",
        {True: {"policy": _ADAPTIVE}, False: _ONE},
    ),
)

_DELAY = "here it is max_batch_delay, in milliseconds"
_QUEUE = "here it is job_queue_size, in requests"
_SIZES = "batch_policy=adaptive finds the sizes itself"
_WORKERS = "here it is the number of workers: initial_workers, or min_worker and max_worker"
#: Names whose values have no direct equivalent, and the hint for each.
FOREIGN_NAMES = {
    "allowed_batch_sizes": "here it is compiled_batch_sizes",
    "auto_batch_timeout": _DELAY,
    "batch_padding_policy": "with compiled_batch_sizes the cheaper of padding and cutting is used",
    "batch_timeout_micros": _DELAY,
    "dynamic_batching": "here it is batch_policy, with batch_size and max_batch_delay",
    "instance_group": _WORKERS,
    "max_concurrency": _QUEUE,
    "max_enqueued_batches": _QUEUE,
    "max_queue_delay_microseconds": _DELAY,
    "max_queue_size": _QUEUE,
    "nireq": "here it is num_requests",
    "num_batch_threads": _WORKERS,
    "num_streams": _WORKERS,
    "preferred_batch_size": _SIZES,
}


def check_foreign(words: Fields, settings: Fields) -> None:
    """Raise ValueError if foreign settings, by name, exclude a setting of the same source."""
    is_automatic = settings.get("is_automatic", False)
    if words.get("batchable") is False and (is_automatic or settings.get("size", 1) > 1):
        raise ValueError("batchable=false is a batch size of 1, but another one is given.")
    if words.get("allow_auto_batching") is False and is_automatic:
        raise ValueError("allow_auto_batching=false and batch_size=auto contradict each other.")
