"""Batches of samples that a handler wants run before the worker is ready: to compile, to compare.

They go through the same `Service.predict` as traffic, once the handler's ``initialize`` is done, to
its end: a subclass may still have a vocabulary to load when its base class asks for them. Who asks
says so in `Context.warm_ups`.
"""

from marserve.backend.padding import repeats
from marserve.backend.protocol import Load, Reply
from marserve.backend.samples import NoSample, find_sample
from marserve.backend.service import Service


class WarmUpFailed(Exception):
    """A batch of samples could not be run; the text says why."""


def warm_up(load: Load, service: Service) -> None:
    """Run what the handler asked for; its context is afterwards as it was.

    Raises:
        Exception: Whatever a warm-up raised: the model is not fit to serve.
    """
    warm_ups = service.take_warm_ups()
    if not warm_ups:
        return
    stage = _Stage(load, service)
    with service.without_traces():
        for each in warm_ups:
            each(stage)


class _Stage:
    """See `marserve.backend.context.RunSamples`."""

    def __init__(self, load: Load, service: Service) -> None:
        self._load = load
        self._service = service

    def __call__(self, rows: int = 1, file: str = "") -> None:
        load, service = self._load, self._service
        if load.asynchronous:
            raise WarmUpFailed("a handler that is a coroutine gets its requests one by one")
        try:
            sample = find_sample(load.model_dir, file or load.sample_input, service.sample_input)
        except NoSample as error:
            raise WarmUpFailed(str(error)) from error
        _check(service.predict(repeats(sample, (f"sample-{place}" for place in range(rows)))))


def _check(reply: Reply) -> None:
    failed = [one.status for one in reply.predictions if one.status >= 400]
    if reply.code != 200:
        failed = [reply.code]
    if failed:
        reason = f" ({reply.message})" if reply.message else ""
        raise WarmUpFailed(
            f"the sample input failed with status {failed[0]}{reason}; the model's log tells why"
        )
