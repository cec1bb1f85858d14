"""Threads that prepare the requests of a batch side by side.

Decoding and resizing an image leave Python's lock alone, so that threads share the work out over
the cores. Each of them computes with one thread of its own: a team of torch's threads for each of
eight decoders would be many times as many as there are cores.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch

# More would only wait for memory, or starve the model that runs meanwhile.
_MAX_BY_DEFAULT = 16


def chosen_threads(settings: Mapping[str, Any] | None, *, has_accelerator: bool) -> int:
    """How many threads decode: ``handler.decode_threads`` of model-config.yaml.

    By default as many as torch computes with, which is the worker's share of the cores; but one
    where the model runs on the same cores, for it needs all of them. (ResNet-152 in bf16 on two
    cores, batches of 8: 33 images a second with one thread, and with two 35 in every other life of
    the worker and 14 to 18 in the rest, for reasons that were not found.)

    Raises:
        ValueError: It says something else than a number of threads.
    """
    chosen = (settings or {}).get("decode_threads")
    if chosen is None:
        if not has_accelerator:
            return 1
        return min(torch.get_num_threads(), _MAX_BY_DEFAULT)
    if type(chosen) is not int or chosen < 1:
        raise ValueError(
            f"model-config.yaml: handler.decode_threads={chosen!r}: it is a number of threads, "
            "1 for none beside the handler's own"
        )
    return chosen


class RequestThreads:
    """A few threads, at least 2, which stay as long as the process."""

    def __init__(self, count: int) -> None:
        before = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(count, "decode", initializer=_compute_alone)
        # All of them now: what they set for themselves holds for threads that begin later, too.
        started = threading.Barrier(count + 1)
        for _ in range(count):
            self._pool.submit(started.wait)
        started.wait()
        torch.set_num_threads(before)

    def run(self, prepare: Callable[[Any], Any], rows: Sequence[Any]) -> "list[Future[Any]]":
        """Prepare all rows; returns what became of each, done, in order."""
        futures = [self._pool.submit(prepare, row) for row in rows]
        wait(futures)
        return futures


def _compute_alone() -> None:
    torch.get_num_threads()  # a thread's first question sets it to what holds for all
    torch.set_num_threads(1)
