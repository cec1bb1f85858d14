"""The program of servers under test: a slow turn of its event loop is written to a file.

A turn is the time from a call of ``call_soon_threadsafe`` to the callback, with all that the loop
does before it. Only time for a reason of the server's own counts: not that for which a thread
waited for a processor (the kernel's ``schedstat``), nor that of the host's other guests
(``steal``).

The garbage collector can be switched off, so that reference cycles stay in memory.
"""

import asyncio
import contextlib
import gc
import os
import sys
import threading
import time
import traceback
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

#: The variable with the path of the file; without it nothing is watched.
SLOW_TURNS = "MARSERVE_TEST_SLOW_TURNS"
#: A variable that switches the collector off.
WITHOUT_COLLECTOR = "MARSERVE_TEST_WITHOUT_COLLECTOR"
#: Seconds of a turn; of shorter ones other clients notice nothing.
LIMIT = 0.05
#: What may take longer, by what its stack contains.
KNOWN = (
    ", in create_subprocess_exec\n",  # the system call returns when the other program runs
    "self._request.FromString(data)\n",  # protobuf parses a message in one call
    ", in _start\n",  # before it has started
    "self._started.wait()\n",  # until the system runs a new thread
    ", in own_workdir\n",  # at the end, when nothing is served
)
_PERIOD = 0.02
_SCRIPT = """#!{python}
import sys
if __name__ == "__main__":
    sys.path.insert(0, {folder!r})
    import watched_program
    watched_program.prepare()
    sys.path.remove({folder!r})
    from marserve.frontend.__main__ import main
    sys.exit(main())
"""


def make_program(folder: Path) -> Path:
    """Write the program, which is called as TorchServe's; return its path."""
    program = folder / "torchserve"
    text = _SCRIPT.format(python=sys.executable, folder=str(Path(__file__).parent))
    program.write_text(text)
    program.chmod(0o755)
    return program


def slow_turns(file: Path) -> list[str]:
    """Return the slow turns in a file, except of `KNOWN` causes, and delete it."""
    try:
        text = file.read_text()
    except FileNotFoundError:
        return []
    file.unlink()
    return [turn for turn in text.split("\0") if turn and not any(map(turn.__contains__, KNOWN))]


def prepare() -> None:
    """Watch the event loop that this process runs next, by `uvloop.run`, as variables say."""
    if WITHOUT_COLLECTOR in os.environ:
        gc.disable()
    if SLOW_TURNS not in os.environ:
        return
    import uvloop

    run = uvloop.run

    def watched_run(main: Coroutine[Any, Any, Any], **options: Any) -> Any:
        return run(_watched(main, Path(os.environ[SLOW_TURNS])), **options)

    uvloop.run = watched_run


async def _watched(main: Coroutine[Any, Any, Any], file: Path) -> Any:
    loop = asyncio.get_running_loop()
    arguments = loop, threading.get_ident(), file
    threading.Thread(target=_watch, args=arguments, daemon=True, name="slow turns").start()
    return await main


def _watch(loop: asyncio.AbstractEventLoop, ident: int, file: Path) -> None:
    clock = _Clock()
    while True:
        time.sleep(_PERIOD)
        turned = threading.Event()
        start = clock.seconds()
        try:
            loop.call_soon_threadsafe(turned.set)
        except RuntimeError:  # it is closed
            return
        if turned.wait(LIMIT):
            continue
        # After a long call of C, which holds the interpreter's lock, this is what has called it.
        stack = traceback.format_stack(sys._current_frames()[ident])
        while not turned.wait(1.0):
            if loop.is_closed():
                return
        # In the loop itself no call runs: it waits for the interpreter's lock of another thread.
        is_idle = "run_until_complete(" in stack[-1]
        if not is_idle and (took := clock.seconds() - start) > LIMIT:
            with file.open("a") as report:
                report.write(f"{took * 1000:.0f} ms\n{''.join(stack)}\0")


class _Clock:
    """A clock that stands while a thread cannot get a processor.

    A thread may hold the interpreter's lock meanwhile, so those of all threads count.
    """

    def __init__(self) -> None:
        self._waited: dict[str, int] = {}  # nanoseconds of each thread
        self._ended = 0

    def seconds(self) -> float:
        before, self._waited = self._waited, {}
        for thread in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):
                waited = int((thread / "schedstat").read_text().split()[1])
                self._waited[thread.name] = waited
        self._ended += sum(
            waited for name, waited in before.items() if self._waited.get(name, -1) < waited
        )
        stolen = 0.0
        with contextlib.suppress(OSError, IndexError):  # a test may hide the file
            stolen = int(Path("/proc/stat").read_text().split("\n", 1)[0].split()[8]) / 100
        waited = sum(self._waited.values()) + self._ended
        return time.monotonic() - waited / 1e9 - stolen / (os.cpu_count() or 1)
