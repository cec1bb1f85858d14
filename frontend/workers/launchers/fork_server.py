"""Workers that are children of multiprocessing, in this interpreter: the usual way.

They come from its fork server, which has torch imported already, so that starting or replacing a
worker costs little more than loading its weights; ``spawn`` gives every worker a fresh interpreter
instead (some libraries dislike fork). The frontend itself never forks: its descriptors would leak
into the child.
"""

import contextlib
import multiprocessing
import os
from collections.abc import Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess

import psutil

from marserve.backend.processes import preloading
from marserve.backend.worker import WorkerSetup, main
from marserve.frontend.workers.launchers.launcher import WorkerSpec
from marserve.frontend.workers.launchers.local_process import Started, our_ends


class ForkServer:
    """Starts children; all of it blocks, and belongs in one thread.

    ``method`` is ``forkserver`` or ``spawn``; ``preload`` the modules that the fork server imports
    once for all workers, as far as it can.
    """

    def __init__(self, method: str, preload: Sequence[str]) -> None:
        self._context: ForkServerContext | SpawnContext
        self._preload = ",".join(preload)
        if method == "forkserver":
            self._context = multiprocessing.get_context("forkserver")
            self._context.set_forkserver_preload(["marserve.backend.worker", preloading.__name__])
        else:
            self._context = multiprocessing.get_context("spawn")

    def ensure_running(self) -> None:
        """Start the fork server, if there is to be one; blocks until its imports are done."""
        if isinstance(self._context, ForkServerContext):
            os.environ[preloading.VARIABLE] = self._preload
            try:
                forkserver.ensure_running()
            finally:
                os.environ.pop(preloading.VARIABLE, None)

    def start(self, spec: WorkerSpec) -> Started:
        """Start a child; its ends are closed here whatever happens."""
        self.ensure_running()
        with contextlib.ExitStack() as theirs, our_ends() as (ours, sock, their_sock, stacks):
            readers, writers = [], []
            for _ in range(2):
                reader, writer = os.pipe()
                readers.append(ours.enter_context(os.fdopen(reader, "rb", buffering=0)))
                writers.append(theirs.enter_context(Connection(writer, readable=False)))
            setup = WorkerSetup(
                sock=their_sock,
                stdout=writers[0],
                stderr=writers[1],
                environment=spec.environment,
                python_path=spec.python_path,
                model_dir=spec.model_dir,
                threads=spec.threads,
                stacks=stacks.path,
                terminal_of=os.getpid() if spec.terminal else 0,
            )
            # Not a daemon in multiprocessing's sense: handlers may start processes of their own.
            process = self._context.Process(target=main, args=(setup,), name=spec.name)
            process.start()
            return Started(_Child(process), sock, readers[0], readers[1], stacks)

    def close(self) -> None:
        """End the fork server now, so that nobody finds it when we are gone.

        By itself it ends at the EOF of a pipe that the daemons of a handler may have inherited, and
        hold open for ever. It has nothing to tidy up, and the library no way to say it. It is not
        reaped here: the library does that if it has to start another.
        """
        if not isinstance(self._context, ForkServerContext):
            return
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error):
                if any(forkserver.__name__ in word for word in child.cmdline()):
                    child.kill()
                    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it cannot linger


class _Child:
    def __init__(self, process: BaseProcess) -> None:
        assert process.pid is not None
        self.pid: int = process.pid
        self.sentinel = process.sentinel
        self._process = process

    def reap(self) -> int:
        self._process.join()  # does not wait: the sentinel has said that it ended
        status = self._process.exitcode
        self._process.close()
        return -1 if status is None else status

    def discard(self) -> None:
        """Without its socket it ends by itself, and the library reaps it."""
