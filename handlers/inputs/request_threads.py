"""Threads that prepare the requests of a batch at the same time.

Decoding and resizing images release the GIL. Each thread computes with one thread of torch: with a
team of torch's threads for each decoder there would be several times more threads than cores.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch

_MAX_BY_DEFAULT = 16  # more would wait for memory, or delay the model that runs meanwhile


def chosen_threads(settings: Mapping[str, Any] | None, *, has_accelerator: bool) -> int:
    """Return the number of threads that decode: ``handler.decode_threads`` of model-config.yaml.

    The default is torch's number of threads, or 1 if the model runs on the same cores. (ResNet-152
    in bf16 on two cores, batches of 8: 33 images/s with one thread; with two 35 in half of the
    workers and 14 to 18 in the others, for an unknown reason.)
    """
    chosen = (settings or {}).get("decode_threads")
    if chosen is None:
        if not has_accelerator:
            return 1
        return min(torch.get_num_threads(), _MAX_BY_DEFAULT)
    if type(chosen) is not int or chosen < 1:
        raise ValueError(
            f"model-config.yaml: handler.decode_threads={chosen!r}: it is a number of threads; "
            "1 means the handler's own"
        )
    return chosen


class RequestThreads:
    """At least 2 threads, which end with the process."""

    def __init__(self, count: int) -> None:
        before = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(count, "decode", initializer=_use_one_torch_thread)
        # Start all now: torch.set_num_threads also sets the default of threads that start later.
        started = threading.Barrier(count + 1)
        for _ in range(count):
            self._pool.submit(started.wait)
        started.wait()
        torch.set_num_threads(before)

    def run(self, prepare: Callable[[Any], Any], rows: Sequence[Any]) -> "list[Future[Any]]":
        """Prepare all rows; return the finished futures in order."""
        futures = [self._pool.submit(prepare, row) for row in rows]
        wait(futures)
        return futures


def _use_one_torch_thread() -> None:
    torch.get_num_threads()  # the first call in a thread sets its number to the default
    torch.set_num_threads(1)
