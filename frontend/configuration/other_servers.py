"""The words of other servers for batching: what each means here, or what it is called.

A word is a row as any setting is (`Setting`), read from the same places; but it is kept nowhere,
since all it does is to choose values of settings. A setting that the same source names itself goes
before what a word implies, and a narrower word before a wider one. Two that leave nothing to choose
from contradict each other (`check_words`).
"""

from collections.abc import Mapping
from typing import Any

from marserve.frontend.configuration.setting import Fields, Setting, camel_case
from marserve.frontend.configuration.setting_kinds import FLAG, Kind, word

LATENCY, THROUGHPUT = "latency", "throughput"
# Of OpenVINO's AUTO: throughput of all devices. Here they are those of the workers.
_CUMULATIVE = "cumulative_throughput"
_UNDEFINED = ("none", "undefined")
#: The values of ``performance_hint``, as in OpenVINO in any case.
HINTS = (LATENCY, THROUGHPUT, _CUMULATIVE, *_UNDEFINED)

_ADAPTIVE = "adaptive"
_ONE: Fields = {"size": 1, "is_automatic": False}
_HINTED: Mapping[str, Fields] = {
    # Nobody waits for others; a batch is what has gathered while the worker was busy.
    LATENCY: {"policy": _ADAPTIVE, "delay": 0.0},
    THROUGHPUT: {"policy": _ADAPTIVE, "is_automatic": True},
    _CUMULATIVE: {"policy": _ADAPTIVE, "is_automatic": True},
}


def _word(name: str, kind: Kind, text: str, means: Mapping[Any, Fields]) -> Setting:
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


#: Widest first.
WORDS = (
    _word(
        "performance_hint",
        word(*HINTS, any_case=True),
        "OpenVINO's: what to set where nothing else is said; see docs/batching.md.",
        _HINTED,
    ),
    _word(
        "allow_auto_batching",
        FLAG,
        "OpenVINO's: false is a batch size of 1 where none is named, true the default.",
        {False: _ONE},
    ),
    _word(
        "batchable",
        FLAG,
        "BentoML's: true is the adaptive policy, false a batch size of 1.",
        {True: {"policy": _ADAPTIVE}, False: _ONE},
    ),
)

_DELAY = "here it is max_batch_delay, in milliseconds"
_QUEUE = "here it is job_queue_size, in requests"
_SIZES = "batch_policy=adaptive finds the sizes itself"
_WORKERS = "here the number of workers says it: initial_workers, or min_worker and max_worker"
#: Names whose values cannot be taken over as they are, and what to say instead.
CALLED_OTHERWISE = {
    "allowed_batch_sizes": "here it is compiled_batch_sizes",
    "auto_batch_timeout": _DELAY,
    "batch_padding_policy": "with compiled_batch_sizes the cheaper of padding and cutting is taken",
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


def check_words(words: Fields, settings: Fields) -> None:
    """Refuse a word and a setting of one source of which only one can hold.

    Args:
        words: The words, by name, and their values.
        settings: What the source names itself.

    Raises:
        ValueError: They contradict each other.
    """
    is_automatic = settings.get("is_automatic", False)
    if words.get("batchable") is False and (is_automatic or settings.get("size", 1) > 1):
        raise ValueError("batchable=false is a batch size of 1, and another one is given, too.")
    if words.get("allow_auto_batching") is False and is_automatic:
        raise ValueError("allow_auto_batching=false and batch_size=auto contradict each other.")
