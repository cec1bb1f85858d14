"""Finds the smallest number of threads with which a model is as fast as with its share of cores.

Small operations end before a second thread has started: a model that consists of them is as fast
or faster with one thread, and leaves the other cores to other workers.

The result is only valid if the cores are free: beside other work the share is as slow as fewer
threads, for any model. The share is then kept, which costs little since waiting threads sleep.
"""

import hashlib
import logging
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from marserve.backend.profiling.batch_sizes import Clock
from marserve.backend.profiling.samples import (
    NoSample,
    failed_status,
    find_sample,
    predict_samples,
)
from marserve.backend.protocol import Input, Load
from marserve.backend.service import Service
from marserve.backend.torch_threads import has_compiled, threads_in_use

logger = logging.getLogger(__name__)

_SECONDS = 1.0
_MIN_ROUNDS, _MAX_ROUNDS = 3, 11
_TOLERANCE = 1.05  # the relative time with fewer threads that is accepted
_ENOUGH_CORES = 0.85  # of the share
_BURN_SECONDS = 0.02
_BLOCK = bytes(1 << 16)
_MAX_ROWS = 8


class Undecided(Exception):
    """The share is kept; the message is the reason."""


def choose_threads(load: Load, service: Service, clock: Clock) -> str:
    """Set torch to the smallest sufficient number of threads; return the reason, empty for none."""
    share = load.trials.threads[-1]
    if threads_in_use() != share or has_compiled():  # set by the handler; or compiled for the share
        return ""
    set_count = sys.modules["torch"].set_num_threads
    try:
        sample = find_sample(load, service)
        run = partial(_run, service, sample, _rows(load))
        with service.without_traces():
            count, why = fewest_threads(load.trials.threads, run, set_count, free_cores, clock)
    except NoSample:
        return ""
    except Undecided as undecided:
        count, why = share, f"its share of the cores: {undecided}"
    except (Exception, SystemExit):  # foreign code
        logger.warning("Trying numbers of threads failed.", exc_info=True)
        count, why = share, "its share of the cores: trying fewer failed; see the model's log"
    set_count(count)
    logger.info("Threads of torch: %d (%s)", count, why)
    return why


def fewest_threads(
    counts: Sequence[int],
    run: Callable[[], object],
    set_count: Callable[[int], object],
    cores: Callable[[int], float],
    clock: Clock,
) -> tuple[int, str]:
    """Return the smallest of these counts with which a run is as fast as with the best, and why.

    ``counts`` rise; ``cores`` measures how many cores a number of threads gets. Raises Undecided.
    """
    deadline = clock() + _SECONDS
    share = counts[-1]
    free = cores(share)

    def seconds_with(count: int) -> float:
        set_count(count)
        run()  # the library starts its threads
        began = clock()
        run()
        return clock() - began

    began = clock()
    set_count(share)
    run()  # the first run may be slow
    if clock() > deadline:
        raise Undecided(f"a batch took {clock() - began:.2g} s, too long to try fewer")
    first = seconds_with(share)
    round_seconds = sum(2 * first * share / count for count in counts)
    if clock() + _MIN_ROUNDS * round_seconds > deadline:
        raise Undecided(f"a batch takes {first:.2g} s, too long to try fewer")
    times: dict[int, list[float]] = {count: [] for count in counts}
    for number in range(_MAX_ROUNDS):
        if number >= _MIN_ROUNDS and clock() > deadline:
            break
        for count in counts:
            times[count].append(seconds_with(count))
    free = min(free, cores(share))
    if free < _ENOUGH_CORES * share:
        raise Undecided(f"others left {free:.1f} of {share} cores while fewer were tried")
    medians = {count: statistics.median(found) for count, found in times.items()}
    enough = _TOLERANCE * min(medians.values())
    chosen = min(count for count, seconds in medians.items() if seconds <= enough)
    figures = ", ".join(f"{1000 * medians[count]:.3g} ms with {count}" for count in counts)
    return chosen, f"tried: a batch took {figures}"


def _run(service: Service, sample: Input, rows: int) -> None:
    if status := failed_status(predict_samples(service, sample, rows)):
        raise Undecided(f"the sample input failed with status {status}")


def free_cores(count: int) -> float:
    """Measure how many cores this process gets for a number of threads."""
    deadline = time.perf_counter() + _BURN_SECONDS
    began, spent = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(count) as pool:
        for _ in range(count):
            pool.submit(_burn, deadline)
    return (time.process_time() - spent) / (time.perf_counter() - began)


def _burn(deadline: float) -> None:
    while time.perf_counter() < deadline:
        hashlib.blake2b(_BLOCK).digest()  # releases the interpreter's lock


def _rows(load: Load) -> int:
    rows = min(load.batch_size, _MAX_ROWS)
    fitting = [size for size in load.compiled_sizes if size <= rows]
    return max(fitting, default=min(load.compiled_sizes, default=rows))
