"""The measurements of a model with samples: trials at load, and batch sizes while it is idle.

A stateful model runs no samples for its costs: they would belong to no sequence.
"""

from collections.abc import Sequence

from marserve.backend.protocol import Trials
from marserve.frontend.configuration.setting_kinds import REFUSE
from marserve.frontend.settings.batching_settings import sizes_to_try, sizes_to_validate
from marserve.frontend.settings.model_settings import ModelSettings
from marserve.frontend.workers.launchers.openmp import TorchOptions


def trials_at_load(settings: ModelSettings) -> Trials:
    """Return the trials between loading and serving, except for `threads_to_try`."""
    return Trials(
        sizes=[] if settings.stateful else sizes_to_try(settings.batching),
        validated_sizes=sizes_to_validate(settings.batching) if settings.validation else [],
        validation_seconds=settings.startup_timeout / 2,
        tolerance=settings.validation_tolerance or 0.0,
        must_validate=settings.validation == REFUSE,
    )


def threads_to_try(options: TorchOptions, settings: ModelSettings, gpu: int | None) -> list[int]:
    """Return the numbers of torch's threads that a worker compares at load; empty for no choice.

    It is empty on a GPU, where these threads have little work, and for modes without batches.
    """
    has_batches = not (settings.mode or settings.debugged or settings.stateful)
    if not options.is_share or options.threads < 2 or gpu is not None or not has_batches:
        return []
    powers = (1 << exponent for exponent in range(options.threads.bit_length()))
    return sorted({*(power for power in powers if power < options.threads), options.threads})


def sizes_while_idle(settings: ModelSettings) -> Sequence[int]:
    """Return the batch sizes that are measured while the model is idle, if their costs are unknown.

    A worker of several processes, with coroutines, or under a debugger cannot run single samples.
    """
    if settings.stateful or settings.asynchronous or settings.debugged or settings.has_ranks:
        return []
    return sizes_to_try(settings.batching)
