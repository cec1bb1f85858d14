"""How the batching of a model version is settled, and changed while it is served.

Each source (request, yaml, ``models=``, the server's own) says some of the fields. They are laid
over each other, the strongest on top, and what one of them implies counts as said by it: a latency
goal makes the policy adaptive, another policy ends the goal. A change of a served model is one more
layer. What nobody has said is derived at the end, every time anew:

    batch size    1; the largest of the compiled sizes; found by measuring if the policy is adaptive
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from marserve.frontend.batching.jobs import Priority
from marserve.frontend.batching.options import (
    ADAPTIVE,
    FIXED,
    MOST_AUTOMATIC,
    Batching,
    with_implied,
)
from marserve.frontend.configuration.batching_values import Fields, read_keys, refuse_value
from marserve.frontend.configuration.config import Config
from marserve.frontend.configuration.repr_limits import shown
from marserve.frontend.errors import ArchiveRefused, BadRequest, ServeError

logger = logging.getLogger(__name__)

#: By name of a setting: the source that decided.
Origins = Mapping[str, str]

# What origins call the attributes of `Batching`.
_TOLD_AS = {
    "size": "batch_size",
    "is_automatic": "batch_size",
    "delay": "max_batch_delay",
    "policy": "batch_policy",
    "max_latency": "max_latency_ms",
    "num_requests": "num_requests",
    "compiled_sizes": "compiled_batch_sizes",
    "queue_size": "job_queue_size",
    "is_queue_bounded": "job_queue_size",
    "seats": "priorityQueueSizes",
    "isolates": "isolateFailures",
    "retries": "retryOnWorkerDeath",
    "splits_lists": "dynamicBatchSize",
}
#: Origins of what nobody has said for this model.
NOBODYS = ("default", "server")
_SIZE = ("size", "is_automatic")
# TorchServe's keys: a wrong value was never more than a word in the log.
_PASSED_OVER = frozenset({"batchSize", "maxBatchDelay", "jobQueueSize"})


@dataclass(frozen=True)
class Mode:
    """Ways of serving that leave no batches to form; keys of model-config.yaml.

    Attributes:
        key: ``asyncCommunication`` or ``continuousBatching``; empty for neither.
    """

    key: str = ""

    def check(self, batching: Batching) -> None:
        """Make sure that nothing is asked for that there is no room for.

        Raises:
            ValueError: Something is; the text names both.
        """
        for asked in _beyond_fixed(batching) if self.key else ():
            raise ValueError(
                f"{asked} has no meaning beside {self.key}: its requests do not wait for each "
                f"other, so that there is nothing but batch_policy={FIXED} with a number as "
                "batch_size."
            )


def _beyond_fixed(batching: Batching) -> Iterator[str]:
    if batching.policy != FIXED:
        yield f"batch_policy={batching.policy}"
    if batching.is_automatic:
        yield "batch_size=auto"
    if batching.compiled_sizes:
        yield f"compiled_batch_sizes={','.join(map(str, batching.compiled_sizes))}"
    if batching.splits_lists:
        yield "dynamicBatchSize=true"


_NO_MODE = Mode()

# -- sources ---------------------------------------------------------------------------------------


def yaml_fields(model_yaml: Mapping[str, Any]) -> Fields:
    """What model-config.yaml says.

    Raises:
        ArchiveRefused: A value is wrong; of TorchServe's own keys that is told and ignored.
    """
    try:
        return _with_classes(read_keys(model_yaml, _on_wrong_yaml))
    except ValueError as error:
        raise _refusal("yaml", error) from error


def models_fields(members: Mapping[str, Any]) -> Fields:
    """What the model's entry in ``models=`` says; each value was looked at when that was read.

    Raises:
        BadRequest: Two names of one field say different things.
    """
    try:
        return _with_classes(read_keys(members))
    except ValueError as error:
        raise _refusal("models", error) from error


def server_fields(config: Config, mode: Mode = _NO_MODE) -> Fields:
    """What holds for all models; a policy only where there are batches to form."""
    policy = {} if mode.key else {"policy": config.default_batch_policy}
    is_chosen = "job_queue_size" in config.texts
    return {**policy, "queue_size": config.job_queue_size, "is_queue_bounded": is_chosen}


def _on_wrong_yaml(key: str, value: object, rule: str) -> None:
    if key not in _PASSED_OVER:
        refuse_value(key, value, rule)
    told = shown(value)
    logger.warning("model-config.yaml: %s=%s is ignored, it takes %s.", key, told, rule)


def _with_classes(said: Fields) -> Fields:
    if "seats" not in said:
        return said
    seats = {Priority[name.upper()]: count for name, count in said["seats"].items()}
    return {**said, "seats": seats}


# -- settling --------------------------------------------------------------------------------------


def settle_batching(
    sources: Mapping[str, Fields], mode: Mode = _NO_MODE
) -> tuple[Batching, Origins]:
    """Lay the sources over each other.

    Args:
        sources: By origin, the strongest first.
        mode: How else the model is served.

    Returns:
        The settings, and for each of them the origin that decided.

    Raises:
        BadRequest, ArchiveRefused: They contradict each other; names fields, values and rule.
    """
    layers = list(sources.items())[::-1]
    try:
        return _settled(layers, mode)
    except ValueError as error:
        raise _refusal(_culprit(layers, mode, error), error) from error


def change_batching(
    batching: Batching, origins: Origins, changes: Fields, *, mode: Mode = _NO_MODE
) -> tuple[Batching, Origins]:
    """Lay what a request changes over what is settled.

    Args:
        batching: As it is.
        origins: Of it.
        changes: What becomes of it.
        mode: How else the model is served.

    Returns:
        The new settings and their origins.

    Raises:
        ValueError: They contradict each other; names fields, values and rule.
    """
    batching, origins = _laid_over(batching, origins, "request", changes)
    return _derived(batching, origins, mode), origins


def restore_batching(
    batching: Batching, origins: Origins, saved: Fields, *, mode: Mode = _NO_MODE
) -> tuple[Batching, Origins]:
    """Lay what a snapshot says over what is settled; where they agree, nothing changes.

    A snapshot always has a size. One that would be derived from the rest stays nobody's.

    Args:
        batching: As it is settled without.
        origins: Of it.
        saved: What the snapshot says.
        mode: How else the model is served.

    Returns:
        The settings and their origins.

    Raises:
        ValueError: They contradict each other; names fields, values and rule.
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


def _settled(layers: Sequence[tuple[str, Fields]], mode: Mode) -> tuple[Batching, Origins]:
    batching = Batching()
    origins: Origins = {"batch_size": "default", "max_batch_delay": "default"}
    for origin, said in layers:
        batching, origins = _laid_over(batching, origins, origin, said)
    return _derived(batching, origins, mode), origins


def _laid_over(
    batching: Batching, origins: Origins, origin: str, said: Fields
) -> tuple[Batching, Origins]:
    new: dict[str, Any] = with_implied(said)
    decided = {
        _TOLD_AS[name]: origin
        for name, value in new.items()
        if name in said or value != getattr(batching, name)
    }
    return replace(batching, **new), {**origins, **decided}


def _derived(batching: Batching, origins: Origins, mode: Mode) -> Batching:
    """With the size that nobody has said, and looked through for contradictions.

    Raises:
        ValueError: There is one.
    """
    batching = _with_size(batching, origins)
    mode.check(batching)
    return batching.check()


def _with_size(batching: Batching, origins: Origins) -> Batching:
    sizes = batching.compiled_sizes
    if origins["batch_size"] == "default":
        is_automatic = batching.policy == ADAPTIVE
        size = sizes[-1] if sizes else 1
        batching = replace(batching, size=size, is_automatic=is_automatic)
    if batching.is_automatic:
        batching = replace(batching, size=sizes[-1] if sizes else MOST_AUTOMATIC)
    return batching


def _culprit(layers: Sequence[tuple[str, Fields]], mode: Mode, error: ValueError) -> str:
    """The origin of a contradiction: the weakest source from which on it is there."""
    culprit, _ = layers[-1]
    for count in range(len(layers) - 1, 0, -1):
        try:
            _settled(layers[:count], mode)
        except ValueError as earlier:
            if str(earlier) == str(error):
                culprit, _ = layers[count - 1]
                continue
        break
    return culprit


def _refusal(origin: str, error: ValueError) -> ServeError:
    if origin == "yaml":
        return ArchiveRefused(f"model-config.yaml: {error}")
    if origin == "models":
        return BadRequest(f"models= in the configuration: {error}")
    return BadRequest(str(error))


# -- what is measured when the model is loaded -----------------------------------------------------


def sizes_to_try(batching: Batching) -> list[int]:
    """The sizes whose cost is worth knowing before any traffic comes; empty where none is."""
    most, compiled = batching.most, batching.compiled_sizes
    if compiled:
        return [one for one in compiled if one <= most] or [compiled[0]]
    if batching.policy != ADAPTIVE and not batching.is_automatic:
        return []
    powers = [1 << exponent for exponent in range(most.bit_length())]
    between = [3 * power // 2 for power in powers[1:]]  # 3, 6, 12, … as the costs are learnt
    return sorted({*(one for one in (*powers, *between) if one <= most), most})
