"""Batches of samples that a handler wants run before the worker is ready: to compile, to compare.

They go through the same `Service.predict` as traffic, once the handler's ``initialize`` is done, to
its end: a subclass may still have a vocabulary to load when its base class asks for them. Who asks
says so in `Context.warm_ups`.
"""

from marserve.backend.padding import repeats
from marserve.backend.profiling.sample_input import NoSample, failed_status, find_sample
from marserve.backend.protocol import Load
from marserve.backend.service import Service


class WarmUpFailed(Exception):
    """A batch of samples could not be run; the text says why."""


def warm_up(load: Load, service: Service) -> None:
    """Run what the handler asked for; its context is afterwards as it was.

    Raises:
        Exception: Whatever a warm-up raised: the model is not fit to serve.
    """

    def run_samples(rows: int = 1, file: str = "") -> None:
        if load.asynchronous:
            raise WarmUpFailed("a handler that is a coroutine gets its requests one by one")
        try:
            sample = find_sample(load.model_dir, file or load.sample_input, service.sample_input)
        except NoSample as error:
            raise WarmUpFailed(str(error)) from error
        reply = service.predict(repeats(sample, (f"sample-{place}" for place in range(rows))))
        if status := failed_status(reply):
            reason = f" ({reply.message})" if reply.message else ""
            raise WarmUpFailed(
                f"the sample input failed with status {status}{reason}; the model's log tells why"
            )

    if warm_ups := service.take_warm_ups():
        with service.without_traces():
            for each in warm_ups:
                each(run_samples)
