"""Finds out whether a model needs all the threads that are its worker's share of the cores.

Small operations are over before a second thread has begun: a model of such is as fast, or faster,
with one, and leaves the other cores to others. So batches of a sample are run with the share and
with fewer threads, in turn, and the fewest are taken that cost next to nothing.

Only where the machine lets it see that. With other work on the cores the share is no faster than
fewer threads for whatever model, and once that work is done it is: then the share stays. (It costs
next to nothing beside others either, since threads that wait sleep.) How many cores are to be had
is tried out, by threads that do nothing but compute.
"""

import hashlib
import logging
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from marserve.backend.profiling.warm_up import NoSample, failed_status, find_sample, predict_samples
from marserve.backend.protocol import Load, Reply
from marserve.backend.service import Service
from marserve.backend.torch_threads import has_compiled, threads_in_use

logger = logging.getLogger(__name__)

_SECONDS = 1.0
_MIN_ROUNDS, _MAX_ROUNDS = 3, 11
#: Fewer threads may be slower by so much.
_TOLERANCE = 1.05
_ENOUGH_CORES = 0.85  # of those that are needed
_BURN_SECONDS = 0.02
_BLOCK = bytes(1 << 16)
_MAX_ROWS = 8

Clock = Callable[[], float]


class Undecided(Exception):
    """The share stays; the text says why."""


def choose_threads(load: Load, service: Service, clock: Clock = time.perf_counter) -> str:
    """Have torch compute with as few of the threads of a load as do; returns why, empty for none.

    Whatever happens, the model stays loaded, with a number of threads that it may have.
    """
    share = load.tried_threads[-1]
    if threads_in_use() != share or has_compiled():  # set by the handler; or compiled for as many
        return ""
    set_count = sys.modules["torch"].set_num_threads
    try:
        sample = find_sample(load.model_dir, load.sample_input, service.sample_input)
        run = partial(_run, partial(predict_samples, service, sample, _rows(load)))
        with service.without_traces():
            count, why = fewest_threads(load.tried_threads, run, set_count, cores_to_be_had, clock)
    except NoSample:
        return ""
    except Undecided as undecided:
        count, why = share, f"its share of the cores: {undecided}"
    except (Exception, SystemExit):  # the model works as far as anybody knows
        logger.warning("Trying out numbers of threads failed.", exc_info=True)
        count, why = share, "its share of the cores: trying fewer failed; the model's log tells why"
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
    """The fewest of these threads, rising, with which a run takes as long as with the best; why.

    ``cores`` tells how many cores are to be had for so many threads.

    Raises:
        Undecided: That could not be seen within a second.
    """
    deadline = clock() + _SECONDS
    share = counts[-1]
    free = cores(share)

    def seconds_with(count: int) -> float:
        set_count(count)
        run()  # the library makes its threads anew
        began = clock()
        run()
        return clock() - began

    began = clock()
    set_count(share)
    run()  # it may be slow for once, and tells enough if it is slow
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


def cores_to_be_had(count: int) -> float:
    """How many cores this process gets now, if it wants so many."""
    deadline = time.perf_counter() + _BURN_SECONDS
    began, spent = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(count) as pool:
        for _ in range(count):
            pool.submit(_burn, deadline)
    return (time.process_time() - spent) / (time.perf_counter() - began)


def _burn(deadline: float) -> None:
    while time.perf_counter() < deadline:
        hashlib.blake2b(_BLOCK).digest()  # without Python's lock


def _rows(load: Load) -> int:
    """How many rows are tried: a batch as it may come, but no large one."""
    rows = min(load.batch_size, _MAX_ROWS)
    fitting = [size for size in load.compiled_sizes if size <= rows]
    return max(fitting, default=min(load.compiled_sizes, default=rows))


def _run(predict: Callable[[], Reply]) -> None:
    if status := failed_status(predict()):
        raise Undecided(f"the sample input failed with status {status}")
