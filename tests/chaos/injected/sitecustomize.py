"""Put on the path of a server under test: its wall clock can be moved, and its tasks be counted.

`time.time` is ahead of the system's by the number in the file CHAOS_CLOCK; `time.monotonic` stays,
as when a host's clock is set. At SIGUSR2 the server writes the names of its asyncio tasks to
CHAOS_TASKS, one a line. No part of it is needed for a run: it is how a run looks inside.
"""

import asyncio
import mmap
import os
import signal
import struct
import sys
import time
from pathlib import Path


def _move_clock(path):
    with Path(path).open("rb") as file:
        shown = mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_READ)
    real, real_ns = time.time, time.time_ns
    time.time = lambda: real() + struct.unpack("d", shown)[0]
    time.time_ns = lambda: real_ns() + int(struct.unpack("d", shown)[0] * 1e9)


def _write_tasks(_number, _frame):
    names = [f"{task.get_name()} {task.get_coro()}\n" for task in asyncio.all_tasks()]
    path = Path(os.environ["CHAOS_TASKS"])
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text("".join(sorted(names)))
    unfinished.replace(path)


if "CHAOS_CLOCK" in os.environ:
    _move_clock(os.environ["CHAOS_CLOCK"])
    if any(Path(word).name == "torchserve" for word in sys.orig_argv[:2]):
        signal.signal(signal.SIGUSR2, _write_tasks)
