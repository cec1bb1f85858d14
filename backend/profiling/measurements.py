"""Measures a model with batches of samples, before it serves and while it is idle.

A failure does not unload the model, and the context of its service is restored.
"""

import logging
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial

from marserve.backend.profiling.batch_sizes import Clock, SizeProfiler
from marserve.backend.profiling.memory import Memory, memory_of
from marserve.backend.profiling.samples import NoSample, find_sample, predict_samples
from marserve.backend.profiling.thread_counts import choose_threads
from marserve.backend.profiling.validation import Validation, comparison
from marserve.backend.protocol import (
    Compare,
    Compared,
    Load,
    Loaded,
    Profile,
    Profiled,
    Trials,
)
from marserve.backend.service import Service
from marserve.backend.torch_threads import threads_in_use

logger = logging.getLogger(__name__)


class Measurements:
    """The measurements of one model; ``clock`` returns seconds."""

    def __init__(self, load: Load, service: Service, clock: Clock = time.perf_counter) -> None:
        self._load = load
        self._service = service
        self._clock = clock
        self._profiled = Profiled()
        self._runs: Iterator[None] = iter(())
        self._memory: Memory | None = None
        self._comparison: Iterator[None] = iter(())
        self._validation = Validation()
        self._compared = _Stopwatch(clock)

    def run_trials(self) -> Loaded:
        """Run `Load.trials`."""
        load, trials, loaded = self._load, self._load.trials, Loaded()
        if trials.threads:
            loaded.threads_why = choose_threads(load, self._service, self._clock)
        loaded.threads = threads_in_use()
        if trials.sizes:
            loaded.profiled = self.profile_all(Profile(trials.sizes, trials.seconds, math.inf))
        if trials.validated_sizes:
            found = Validation()
            with self._service.without_traces():
                for _ in comparison(load, self._service, loaded.profiled.costs, self._clock, found):
                    pass
            if found.sizes or found.failure or not trials.only_differences:
                loaded.validation = asdict(found)
        return loaded

    def run_once(self, message: Profile | Compare) -> Profiled | Compared:
        """Do one run: the first if the message has sizes, else the next."""
        if isinstance(message, Compare):
            return self.compare_once(message)
        return self._profile(message, is_whole=False)

    def compare_once(self, message: Compare) -> Compared:
        """Do one run of a comparison."""
        if message.sizes:
            trials = Trials(
                validated_sizes=message.sizes,
                validation_seconds=message.seconds,
                tolerance=message.tolerance,
                only_differences=True,
            )
            load = replace(self._load, compiled_sizes=message.compiled_sizes, trials=trials)
            self._validation, self._compared = Validation(), _Stopwatch(self._clock)
            self._comparison = comparison(
                load, self._service, (), self._compared, self._validation, message.longest
            )
        with self._service.without_traces(), self._compared:
            is_complete = next(self._comparison, self) is self
        return Compared(asdict(self._validation) if is_complete else None, self._service.poison)

    def profile_all(self, profile: Profile) -> Profiled:
        """Do all runs of profiling."""
        profiled = self._profile(profile, is_whole=True)
        costs = ", ".join(
            f"{size} in {1000 * seconds:.3g} ms" for size, seconds, _ in profiled.costs
        )
        logger.info(
            "Batch sizes profiled: %s", " - ".join(filter(None, (costs or "none", profiled.note)))
        )
        return profiled

    def _profile(self, profile: Profile, *, is_whole: bool) -> Profiled:
        try:
            if profile.sizes:
                self._start(profile)
            with self._service.without_traces():
                for _ in self._runs:
                    if not is_whole:
                        break
            if is_whole and self._memory is not None:
                self._memory.release()
        except NoSample as error:
            self._profiled = Profiled(note=str(error))
        except Exception:  # the model may well work: it is served
            logger.warning("Profiling failed.", exc_info=True)
            self._profiled = Profiled(note="profiling failed; see the model's log")
        found = self._profiled
        return replace(found, costs=[*found.costs], poisoned=self._service.poison)

    def _start(self, profile: Profile) -> None:
        self._profiled, self._runs = Profiled(), iter(())
        if self._load.asynchronous:
            raise NoSample("a handler that is a coroutine gets its requests one by one")
        sample = find_sample(self._load, self._service)
        self._memory = memory_of(self._load.gpu_id)
        profiler = SizeProfiler(
            partial(predict_samples, self._service, sample),
            self._memory,
            self._clock,
            profile.seconds,
            profile.longest,
        )
        self._profiled, self._runs = profiler.found, profiler.runs(profile.sizes)


class _Stopwatch:
    """A clock that counts the seconds within its ``with`` blocks."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began = self._before = 0.0

    def __call__(self) -> float:
        return self._before + self._clock() - self._began

    def __enter__(self) -> None:
        self._began = self._clock()

    def __exit__(self, *_: object) -> None:
        self._before = self()
