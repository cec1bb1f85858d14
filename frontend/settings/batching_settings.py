"""The batching settings that follow from others, and those that exclude each other.

A batch size that no source sets is 1, the largest of the compiled sizes, or automatic if the policy
is adaptive.

A *mode* is the key of model-config.yaml by which a model forms no batches (``asyncCommunication``,
``continuousBatching``), or forms them in the order of the requests only (``sequenceBatching``); it
is empty for other models.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from marserve.frontend.batching.options import MAX_AUTOMATIC_SIZE, Batching
from marserve.frontend.configuration.model_schema import (
    ADAPTIVE,
    BY_LENGTH_IF_WORTH,
    FIXED,
    UNSORTED,
)
from marserve.frontend.configuration.other_servers import FOREIGN

#: The source of each setting that a source sets, by the name of the setting.
Origins = Mapping[str, str]

#: The mode of a stateful model, whose requests form batches.
SEQUENCES = "sequenceBatching"


def with_size(batching: Batching, origins: Origins) -> Batching:
    """Return the settings with the batch size that follows from the others."""
    sizes = batching.compiled_sizes
    if "batch_size" not in origins:
        is_automatic = batching.policy == ADAPTIVE
        size = sizes[-1] if sizes else 1
        batching = replace(batching, size=size, is_automatic=is_automatic)
    if batching.is_automatic:
        batching = replace(batching, size=sizes[-1] if sizes else MAX_AUTOMATIC_SIZE)
    return batching


def complete_batching(batching: Batching, origins: Origins, mode: str) -> Batching:
    """Return the settings with all that follows from others.

    Raises:
        ValueError: They contradict each other; the text names fields and values.
    """
    batching = with_size(batching, origins)
    if "batch_bucket_by" not in origins:
        is_automatic = batching.policy == ADAPTIVE and not mode
        bucket_by = BY_LENGTH_IF_WORTH if is_automatic else UNSORTED
        batching = replace(batching, bucket_by=bucket_by)
    if mode == SEQUENCES:
        for asked in _buckets(batching):
            raise ValueError(
                f"{asked} has no meaning beside {mode}: the requests of sequences keep their order."
            )
    elif mode:
        for asked in _beyond_fixed(batching):
            source = origins.get(asked.partition("=")[0])
            if source in FOREIGN:  # perhaps the only setting that was given
                asked = f"{asked} (by {source})"
            raise ValueError(
                f"{asked} has no meaning beside {mode}: its requests do not wait for each other, "
                f"so it has only batch_policy={FIXED} with a number as batch_size."
            )
    return batching.check()


def _beyond_fixed(batching: Batching) -> Iterator[str]:
    """Yield the settings that need batches."""
    if batching.max_latency:  # it implies a policy
        yield f"max_latency_ms={batching.max_latency * 1000:g}"
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
