"""The choice of a worker's dispatch strategy by the settings of its model."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from marserve.frontend.serving.host import WorkerHost
from marserve.frontend.serving.worker_spec import ServedModel
from marserve.frontend.workers.dispatch.asynchronous import MAX_IN_FLIGHT
from marserve.frontend.workers.dispatch.batched import DispatchStrategy
from marserve.frontend.workers.dispatch.outstanding import dispatch_batches
from marserve.frontend.workers.supervisor import MakeDispatch


class DispatchKinds(NamedTuple):
    """The classes of dispatch strategies (`workers.dispatch`)."""

    batched: Callable[..., DispatchStrategy]
    several: Callable[..., DispatchStrategy]
    continuous: Callable[..., DispatchStrategy]
    asynchronous: Callable[..., DispatchStrategy]


def choose_dispatch(
    model: ServedModel,
    host: WorkerHost,
    kinds: DispatchKinds,
    has_workers_left: Callable[[], bool],
) -> MakeDispatch:
    """Return the function that makes a worker's dispatch strategy.

    ``has_workers_left`` returns whether a job can be retried; otherwise queued jobs have failed.
    """
    settings = model.settings
    timeout = None if settings.debugged else settings.response_timeout
    if settings.asynchronous:
        # As in TorchServe, long generations have no timeout unless the model sets one.
        is_chosen = settings.origins.get("response_timeout") != "server"
        return partial(
            kinds.asynchronous,
            timeout=timeout if is_chosen else None,
            has_workers_left=has_workers_left,
            limit=settings.outstanding_batches or MAX_IN_FLIGHT,
            call_model=host.calls_by(model.manifest.model_name, model.manifest.model_version),
        )
    if settings.continuous_batching:
        return partial(kinds.continuous, timeout=timeout, has_workers_left=has_workers_left)
    return partial(
        dispatch_batches,
        timeout=timeout,
        has_workers_left=has_workers_left,
        outstanding=settings.outstanding_batches,
        devices=max(1, model.parallel_level),
        batched=kinds.batched,
        several=kinds.several,
    )
