"""Runs the warm-ups that a handler has registered in `Context.warm_ups`, to compile or to compare.

They run when its ``initialize`` has returned, because a subclass may load more (a vocabulary) after
its base class has registered them.
"""

from marserve.backend.profiling.samples import (
    NoSample,
    failed_status,
    find_sample,
    predict_samples,
)
from marserve.backend.protocol import Load
from marserve.backend.service import Service


class WarmUpFailed(Exception):
    """A batch of samples could not be run; the message is the reason."""


def warm_up(load: Load, service: Service) -> None:
    """Run the warm-ups; the handler's context is afterwards as it was.

    An exception of a warm-up is raised: the model is not fit to serve.
    """

    def run_samples(rows: int = 1, file: str = "") -> None:
        if load.asynchronous:
            raise WarmUpFailed("a handler that is a coroutine gets its requests one by one")
        try:
            sample = find_sample(load, service, file)
        except NoSample as error:
            raise WarmUpFailed(str(error)) from error
        reply = predict_samples(service, sample, rows)
        if status := failed_status(reply):
            reason = f" ({reply.message})" if reply.message else ""
            raise WarmUpFailed(
                f"the sample input failed with status {status}{reason}; see the model's log"
            )

    warm_ups, service.context.warm_ups = service.context.warm_ups, []
    if warm_ups:
        with service.without_traces():
            for each in warm_ups:
                each(run_samples)
