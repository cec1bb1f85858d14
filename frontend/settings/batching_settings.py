"""Resolves the batching settings of a model version, also for changes while it is served.

The sources (request, yaml, ``models=``, server, later changes) are merged; the strongest wins. A
source also sets what its values imply: a latency goal makes the policy adaptive, another policy
removes the goal. A batch size that no source sets is derived after each change: 1, the largest of
the compiled sizes, or automatic if the policy is adaptive.

A *mode* is the key of model-config.yaml by which a model forms no batches (``asyncCommunication``,
``continuousBatching``), or forms them in the order of the requests only (``sequenceBatching``); it
is empty for other models.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from marserve.frontend.batching.options import (
    MAX_AUTOMATIC_SIZE,
    Batching,
    with_implied,
)
from marserve.frontend.configuration.model_schema import (
    ADAPTIVE,
    BATCHING,
    BY_LENGTH_IF_WORTH,
    FIXED,
    UNSORTED,
)
from marserve.frontend.configuration.setting import Fields
from marserve.frontend.errors import ArchiveRefused, BadRequest, ServeError

#: The source of each setting, by the name of the setting.
Origins = Mapping[str, str]

#: The mode of a stateful model, whose requests form batches.
SEQUENCES = "sequenceBatching"
#: The origins of values that are not set for this model.
DEFAULT_ORIGINS = ("default", "server")

_SIZE = ("size", "is_automatic")
_NAMES = {
    **{row.attribute: row.name for row in BATCHING},
    "is_automatic": "batch_size",
    "is_queue_bounded": "job_queue_size",
}


def resolve_batching(sources: Mapping[str, Fields], mode: str = "") -> tuple[Batching, Origins]:
    """Return the settings of the sources, and their origins; the strongest source comes first.

    Raises:
        BadRequest, ArchiveRefused: They contradict each other; the text names fields and values.
    """
    layers = list(sources.items())[::-1]
    try:
        return _resolved(layers, mode)
    except ValueError as error:
        raise refusal(_origin_of(layers, mode, error), error) from error


def change_batching(
    batching: Batching, origins: Origins, changes: Fields, mode: str = ""
) -> tuple[Batching, Origins]:
    """Apply the changes of a request; raises ValueError if they contradict other settings."""
    batching, origins = _merged(batching, origins, "request", changes)
    return _derived(batching, origins, mode), origins


def restore_batching(
    batching: Batching, origins: Origins, saved: Fields, mode: str = ""
) -> tuple[Batching, Origins]:
    """Apply the settings of a snapshot; raises ValueError if they contradict other settings.

    Equal values change nothing: a snapshot always has a size, even one that was derived.
    """
    for is_size in (False, True):
        batching = _with_size(batching, origins)
        differing = {
            name: value
            for name, value in saved.items()
            if (name in _SIZE) is is_size and value != getattr(batching, name)
        }
        batching, origins = _merged(batching, origins, "snapshot", differing)
    return _derived(batching, origins, mode), origins


def refusal(origin: str, error: ValueError) -> ServeError:
    """Return the error of a source as a client reads it."""
    if origin == "yaml":
        return ArchiveRefused(f"model-config.yaml: {error}")
    if origin == "models":
        return BadRequest(f"models= in the configuration: {error}")
    if origin == "catalog":
        return BadRequest(f"The catalog: {error}")
    return BadRequest(str(error))


def _resolved(layers: Sequence[tuple[str, Fields]], mode: str) -> tuple[Batching, Origins]:
    batching = Batching()
    origins: Origins = {"batch_size": "default", "max_batch_delay": "default"}
    for origin, fields in layers:
        batching, origins = _merged(batching, origins, origin, fields)
    return _derived(batching, origins, mode), origins


def _merged(
    batching: Batching, origins: Origins, origin: str, fields: Fields
) -> tuple[Batching, Origins]:
    new: dict[str, Any] = with_implied(fields)
    decided = {
        _NAMES[name]: origin
        for name, value in new.items()
        if name in fields or value != getattr(batching, name)
    }
    return replace(batching, **new), {**origins, **decided}


def _derived(batching: Batching, origins: Origins, mode: str) -> Batching:
    """Return checked settings with the derived values; ValueError names both sides."""
    batching = _with_bucket(_with_size(batching, origins), origins, mode)
    if mode == SEQUENCES:
        for asked in _buckets(batching):
            raise ValueError(
                f"{asked} has no meaning beside {mode}: the requests of sequences keep their order."
            )
    elif mode:
        for asked in _beyond_fixed(batching):
            raise ValueError(
                f"{asked} has no meaning beside {mode}: its requests do not wait for each other, "
                f"so it has only batch_policy={FIXED} with a number as batch_size."
            )
    return batching.check()


def _with_bucket(batching: Batching, origins: Origins, mode: str) -> Batching:
    if "batch_bucket_by" in origins:
        return batching
    is_automatic = batching.policy == ADAPTIVE and not mode
    return replace(batching, bucket_by=BY_LENGTH_IF_WORTH if is_automatic else UNSORTED)


def _with_size(batching: Batching, origins: Origins) -> Batching:
    sizes = batching.compiled_sizes
    if origins["batch_size"] == "default":
        is_automatic = batching.policy == ADAPTIVE
        size = sizes[-1] if sizes else 1
        batching = replace(batching, size=size, is_automatic=is_automatic)
    if batching.is_automatic:
        batching = replace(batching, size=sizes[-1] if sizes else MAX_AUTOMATIC_SIZE)
    return batching


def _beyond_fixed(batching: Batching) -> Iterator[str]:
    """Yield the settings that need batches."""
    if batching.policy != FIXED:
        yield f"batch_policy={batching.policy}"
    if batching.is_automatic:
        yield "batch_size=auto"
    if batching.compiled_sizes:
        yield f"compiled_batch_sizes={','.join(map(str, batching.compiled_sizes))}"
    if batching.splits_lists:
        yield "dynamicBatchSize=true"
    yield from _buckets(batching)


def _buckets(batching: Batching) -> Iterator[str]:
    if batching.bucket_by != UNSORTED:
        yield f"batch_bucket_by={batching.bucket_by}"


def _origin_of(layers: Sequence[tuple[str, Fields]], mode: str, error: ValueError) -> str:
    """Return the origin of a contradiction: the weakest source that causes it."""
    found, _ = layers[-1]
    for count in range(len(layers) - 1, 0, -1):
        try:
            _resolved(layers[:count], mode)
        except ValueError as earlier:
            if str(earlier) == str(error):
                found, _ = layers[count - 1]
                continue
        break
    return found


def sizes_to_validate(batching: Batching) -> list[int]:
    """Return the sizes of batches whose answers are compared with those of single requests.

    The two smallest and the largest; of compiled sizes each, and one that is padded.
    """
    maximum = batching.max_size
    if batching.compiled_sizes:
        compiled = [size for size in batching.compiled_sizes if size <= maximum]
        found = {*compiled, *(size - 1 for size in compiled)}
    else:
        found = {2, 3, maximum}
    return sorted(size for size in found if 1 < size <= maximum)


def sizes_to_try(batching: Batching) -> list[int]:
    """Return the sizes whose costs are measured before the model serves; empty for none."""
    is_used = batching.compiled_sizes or batching.is_automatic or batching.policy == ADAPTIVE
    return batching.sizes_to_try if is_used else []
