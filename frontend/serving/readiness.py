"""What "ready" means: requests are answered now, not only taken into a queue.

TorchServe's /ping counts workers that still load as healthy, and its /v2/health/ready always says
yes. Here workers that have loaded count; and a server about to stop is neither ready nor healthy,
so that balancers send requests elsewhere while it still answers those that come.

A model may also be full: it would refuse a new request, or nearly so (`fullness`). Only those are
told who ask for one model. The server as a whole is never "full": of several models some have room,
and where a load is too much for all replicas, a balancer that takes out one after the other would
have none left to send anything to.
"""

import asyncio
from typing import NamedTuple

from marserve.frontend.errors import retry_after
from marserve.frontend.serving.model_version import ModelVersion
from marserve.frontend.serving.registry import ModelRegistry

_PAUSE_SECONDS = 0.05


def is_healthy(registry: ModelRegistry) -> bool:
    """Whether every default version has its minimum of healthy workers: what /ping says."""
    return not registry.is_leaving and all(
        model.workers.is_healthy for model in registry.defaults()
    )


def unready(registry: ModelRegistry) -> set[str]:
    """Names of the models whose default version has fewer READY workers than its minimum.

    Also of those that the start could not load, until they are registered or unregistered, and of
    those that the catalog wanted at start, until they are there. A model that comes into a catalog
    later and cannot be loaded does not count: it would take all replicas from their clients.
    """
    waiting = (model.name for model in registry.defaults() if _lacks_workers(model))
    return registry.failed.awaited.union(registry.catalog_progress.awaited, waiting)


def _lacks_workers(model: ModelVersion) -> bool:
    return model.workers.ready < model.workers.min_workers


def is_server_ready(registry: ModelRegistry) -> bool:
    """Whether every model answers, and will for longer than a moment."""
    progress = registry.catalog_progress
    if registry.is_leaving or not progress.is_known or progress.awaited or registry.failed.awaited:
        return False
    return not any(map(_lacks_workers, registry.defaults()))


async def until_ready(registry: ModelRegistry) -> None:
    """Wait until every model answers.

    No deadline: whoever waits for it, such as a platform that keeps its clients away meanwhile, has
    one of its own.
    """
    while not is_server_ready(registry):  # noqa: ASYNC110 - it has many causes, and none is an event
        await asyncio.sleep(_PAUSE_SECONDS)


def is_ready(registry: ModelRegistry, model: ModelVersion) -> bool:
    """Whether a version answers: its minimum of workers is READY, and at least one is."""
    enough = model.workers.ready >= max(1, model.workers.min_workers)
    return enough and not registry.is_leaving


class ModelReadiness(NamedTuple):
    """Whether a model takes a request now: in a word, why not, and seconds until another look."""

    status: str
    reason: str = ""
    retry_after: int = 0


READY = "Ready"


def model_readiness(
    registry: ModelRegistry, model: ModelVersion, share_in_flight: float
) -> ModelReadiness:
    """Whether a version would answer a new request of whoever asks; see `ModelVersion.why_full`."""
    if registry.is_leaving:
        return ModelReadiness("Stopping", "The server is about to stop.", retry_after(0))
    if not is_ready(registry, model):
        workers, least = model.workers.ready, max(1, model.workers.min_workers)
        return ModelReadiness(
            "Not ready", f"{workers} of {least} workers are ready.", retry_after(0)
        )
    if reason := model.why_full(share_in_flight):
        return ModelReadiness("Full", reason, retry_after(model.expected_seconds))
    return ModelReadiness(READY)
