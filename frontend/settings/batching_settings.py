"""How the batching of a model version is resolved, and changed while it is served.

The sources (request, yaml, ``models=``, the server's own, later changes) are laid over each other,
the strongest on top, and what one of them implies counts as set by it: a latency goal makes the
policy adaptive, another policy ends the goal. A batch size that no source has set is derived at the
end, every time anew: 1, the largest of the compiled sizes, or automatic if the policy is adaptive.

A *mode* is the key of model-config.yaml by which a model is served so that there are no batches to
form: ``asyncCommunication`` or ``continuousBatching``; or ``sequenceBatching``, where batches are
formed in one order only. Empty for none of them.
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

#: By name of a setting: the source that decided.
Origins = Mapping[str, str]

#: The mode of a stateful model whose requests do form batches.
SEQUENCES = "sequenceBatching"
#: Origins of what was not set for this model.
DEFAULT_ORIGINS = ("default", "server")

_SIZE = ("size", "is_automatic")
_NAMES = {
    **{row.attribute: row.name for row in BATCHING},
    "is_automatic": "batch_size",
    "is_queue_bounded": "job_queue_size",
}


def resolve_batching(sources: Mapping[str, Fields], mode: str = "") -> tuple[Batching, Origins]:
    """The settings of the sources, the strongest first, and the origin that decided each of them.

    Raises:
        BadRequest, ArchiveRefused: They contradict each other; names fields, values and rule.
    """
    layers = list(sources.items())[::-1]
    try:
        return _resolved(layers, mode)
    except ValueError as error:
        raise refusal(_origin_of(layers, mode, error), error) from error


def change_batching(
    batching: Batching, origins: Origins, changes: Fields, mode: str = ""
) -> tuple[Batching, Origins]:
    """Lay what a request changes over what is resolved; raises ValueError for a contradiction."""
    batching, origins = _laid_over(batching, origins, "request", changes)
    return _derived(batching, origins, mode), origins


def restore_batching(
    batching: Batching, origins: Origins, saved: Fields, mode: str = ""
) -> tuple[Batching, Origins]:
    """Lay a snapshot over what is resolved; raises ValueError for a contradiction.

    Where they agree, nothing changes: a snapshot always has a size, even one that was derived.
    """
    for is_size in (False, True):
        batching = _with_size(batching, origins)
        differing = {
            name: value
            for name, value in saved.items()
            if (name in _SIZE) is is_size and value != getattr(batching, name)
        }
        batching, origins = _laid_over(batching, origins, "snapshot", differing)
    return _derived(batching, origins, mode), origins


def refusal(origin: str, error: ValueError) -> ServeError:
    """An error in the settings of a source, as the client is to read it."""
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
        batching, origins = _laid_over(batching, origins, origin, fields)
    return _derived(batching, origins, mode), origins


def _laid_over(
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
    """With the size that was not set, and checked; a ValueError names both sides."""
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
                f"so that there is nothing but batch_policy={FIXED} with a number as batch_size."
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
    """What is asked for that only batches can have."""
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
    """The origin of a contradiction: the weakest source from which on it is there."""
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
    """The sizes of batches whose answers are compared with those of single requests.

    The smallest that are batches, and the largest; of one that is found by measuring, as far as
    that comes. Of compiled sizes each, and one that is padded.
    """
    maximum = batching.max_size
    if batching.compiled_sizes:
        compiled = [size for size in batching.compiled_sizes if size <= maximum]
        found = {*compiled, *(size - 1 for size in compiled)}
    else:
        found = {2, 3, maximum}
    return sorted(size for size in found if 1 < size <= maximum)


def sizes_to_try(batching: Batching) -> list[int]:
    """The sizes whose cost is worth knowing before any traffic comes; empty where none is."""
    is_used = batching.compiled_sizes or batching.is_automatic or batching.policy == ADAPTIVE
    return batching.sizes_to_try if is_used else []
