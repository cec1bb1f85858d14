"""Measures the costs of batches while the model is idle, one run for each message.

What was switched on while the model served could not be measured at load. Between two runs the
worker answers whatever requests came.
"""

import logging
import time
from collections.abc import Iterator
from functools import partial

from marserve.backend.profiling.batch_sizes import Clock, Findings, profile_in_steps
from marserve.backend.profiling.memory import memory_of
from marserve.backend.profiling.warm_up import NoSample, find_sample, predict_samples
from marserve.backend.protocol import Load, Profile, Reply
from marserve.backend.service import Service

logger = logging.getLogger(__name__)


class IdleProfiling:
    """Runs the batches of samples that the frontend asks for."""

    def __init__(self, load: Load, service: Service, clock: Clock = time.perf_counter) -> None:
        self._load = load
        self._service = service
        self._clock = clock
        self._findings = Findings()
        self._steps: Iterator[None] = iter(())

    def run(self, message: Profile) -> Reply:
        """Do the next run; never raises, whatever the handler does."""
        try:
            if message.sizes:
                self._begin(message)
            with self._service.without_traces():
                next(self._steps, None)
        except NoSample as error:
            self._findings = Findings(note=str(error))
        except Exception:  # the model works as far as anybody knows: no reason not to serve it
            logger.warning("Profiling failed.", exc_info=True)
            self._findings = Findings(note="profiling failed; the model's log tells why")
        found = self._findings
        return Reply(
            costs=list(found.costs),
            profiling_note=found.note,
            too_large=found.too_large,
            poisoned=self._service.poison,
        )

    def _begin(self, message: Profile) -> None:
        load, service = self._load, self._service
        self._findings = Findings()
        sample = find_sample(load.model_dir, load.sample_input, service.sample_input)
        self._steps = profile_in_steps(
            self._findings,
            partial(predict_samples, service, sample),
            message.sizes,
            message.seconds,
            memory_of(load.gpu_id),
            self._clock,
            message.longest,
        )
