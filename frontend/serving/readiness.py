"""Readiness and health of models and of the server.

Ready means that requests are answered, not only queued: only workers that have loaded count. (In
TorchServe loading workers are healthy, and /v2/health/ready is always true.) A server about to stop
is neither ready nor healthy, so that balancers send requests elsewhere while it still answers.

A full model (`fullness`) is not ready, but the server as a whole is never full: under a load that
is too high for all replicas, balancers would remove one after another until none is left.
"""

import asyncio
from typing import NamedTuple

from marserve.frontend.errors import retry_after
from marserve.frontend.serving.model_version import ModelVersion
from marserve.frontend.serving.registry import ModelRegistry

_PAUSE_SECONDS = 0.05


def is_healthy(registry: ModelRegistry) -> bool:
    """Return whether every default version has its minimum of healthy workers, for /ping."""
    return not registry.is_leaving and all(
        model.workers.is_healthy for model in registry.defaults()
    )


def unready(registry: ModelRegistry) -> set[str]:
    """Return the names of the models that are not ready.

    A model that is added to the catalog after the start and cannot be loaded is not among them: all
    replicas would become unready.
    """
    waiting = (
        model.name
        for model in registry.defaults()
        if model.workers.ready < model.workers.min_workers
    )
    return registry.failed.awaited.union(registry.catalog_progress.awaited, waiting)


def is_server_ready(registry: ModelRegistry) -> bool:
    """Return whether every model answers, and the server is not about to stop."""
    is_known = registry.catalog_progress.is_known
    return is_known and not registry.is_leaving and not unready(registry)


async def until_ready(registry: ModelRegistry) -> None:
    """Wait until every model answers, without a deadline: the platform that waits has one."""
    while not is_server_ready(registry):  # noqa: ASYNC110 - no event covers its causes
        await asyncio.sleep(_PAUSE_SECONDS)


def is_ready(registry: ModelRegistry, model: ModelVersion) -> bool:
    """Return whether a version has its minimum of READY workers, and at least one."""
    enough = model.workers.ready >= max(1, model.workers.min_workers)
    return enough and not registry.is_leaving


class ModelReadiness(NamedTuple):
    """Whether a model accepts a request: a word, the reason, and seconds until the next check."""

    status: str
    reason: str = ""
    retry_after: int = 0


READY = "Ready"


def model_readiness(
    registry: ModelRegistry, model: ModelVersion, share_in_flight: float
) -> ModelReadiness:
    """Return whether a version would accept a new request of a client.

    ``share_in_flight`` is the used share of the client's limits of bytes in flight.
    """
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
