"""What "ready" means: requests are answered now, not only taken into a queue.

TorchServe's /ping counts workers that still load as healthy, and its /v2/health/ready always says
yes. Here workers that have loaded count; and a server about to stop is neither ready nor healthy,
so that balancers send requests elsewhere while it still answers those that come.
"""

from marserve.frontend.models.model_version import ModelVersion
from marserve.frontend.models.registry import ModelRegistry


def is_healthy(registry: ModelRegistry) -> bool:
    """Whether every default version has its minimum of healthy workers: what /ping says."""
    return not registry.is_leaving and all(
        model.workers.is_healthy for model in registry.defaults()
    )


def unready(registry: ModelRegistry) -> list[str]:
    """Names of the models whose default version has fewer READY workers than its minimum.

    Also of those that the start could not load, until they are registered or unregistered.
    """
    waiting = {
        model.name
        for model in registry.defaults()
        if model.workers.ready < model.workers.min_workers
    }
    return sorted(waiting | {load.name for load in registry.failed})


def is_server_ready(registry: ModelRegistry) -> bool:
    """Whether every model answers, and will for longer than a moment."""
    return not registry.is_leaving and not unready(registry)


def is_ready(registry: ModelRegistry, model: ModelVersion) -> bool:
    """Whether a version answers: its minimum of workers is READY, and at least one is."""
    enough = model.workers.ready >= max(1, model.workers.min_workers)
    return enough and not registry.is_leaving
