"""Starts workers by a fork server that has imported torch; the usual way.

The frontend itself never forks: its descriptors would leak into the child.

The fork server is not multiprocessing's: that one has no deadlines, and its workers count as dead
when it dies. Requests to this one (`backend.processes.fork_server`) block in daemon threads.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from marserve.backend.processes.fork_server import command
from marserve.backend.worker import WorkerPlace
from marserve.frontend.aio.background import in_abandonable_thread
from marserve.frontend.workers.launchers.local_process import Started, WorkerSpec, our_ends

logger = logging.getLogger(__name__)

# The time limit of an answer, which costs at most a fork: 15 ms on an idle machine.
_ANSWER_SECONDS = 2.0
# The time limit for the end of a fork server that was killed.
_END_SECONDS = 1.0
_MAX_ANSWER_BYTES = 1024
# A fork server that lived shorter is replaced for the next worker, not at once.
_STABLE_SECONDS = 10.0
_TRIES = 3


class ForkServerLost(OSError):
    """The fork server has ended, or was killed because it did not answer."""


@dataclass(frozen=True)
class _Answer:
    pid: int = 0
    status: int = 0
    error: str = ""
    sentinel: int = -1


class ForkServer:
    """Starts workers by a fork server that is replaced when it has ended or does not answer.

    Args:
        modules: Imported once for all workers.
        import_seconds: Time limit of the imports; a fork server that exceeds it is replaced by one
            without them.
        environment: Of the fork server. What libraries read of it when they are imported applies
            to the workers, regardless of their environment.
    """

    def __init__(
        self,
        modules: Sequence[str],
        import_seconds: float,
        on_replaced: Callable[[], object] = lambda: None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._modules = tuple(modules)
        self._environment = environment
        self._import_seconds = import_seconds
        self._on_replaced = on_replaced
        #: Starts a process and waits for its imports; replaced when that process is lost.
        self._starting: asyncio.Task[_Process] | None = None
        self._is_closed = False

    def warm_up(self) -> None:
        """Start the fork server, if there is none."""
        if not self._is_closed and (self._starting is None or _has_failed(self._starting)):
            self._starting = asyncio.create_task(self._start(), name="fork server")
            self._starting.add_done_callback(_has_failed)  # else asyncio logs its exception

    async def start(self, spec: WorkerSpec) -> Started:
        """Start a worker; if the fork server is lost meanwhile, with the next one."""
        try:
            return await self._fork(spec)
        except ForkServerLost:
            return await self._fork(spec)

    async def close(self) -> None:
        """End the fork server; its workers must have ended."""
        self._is_closed = True
        starting, self._starting = self._starting, None
        if starting is None:
            return
        starting.cancel()
        await asyncio.wait({starting})  # `_Process.kill` has a deadline
        if not starting.cancelled() and starting.exception() is None:
            await starting.result().kill()

    async def _fork(self, spec: WorkerSpec) -> Started:
        self.warm_up()
        if self._starting is None:
            raise ForkServerLost("the server is stopping")
        process = await asyncio.shield(self._starting)  # `_start` has deadlines
        return await in_abandonable_thread(process.fork, spec, discard=Started.discard)

    async def _start(self) -> "_Process":
        reason = ""
        for attempt in range(_TRIES):
            modules = self._modules if attempt < _TRIES - 1 else ()
            process = await in_abandonable_thread(
                _Process, modules, self._environment, discard=_Process.discard
            )
            ended = process.watch()
            ended.add_done_callback(partial(self._on_lost, process))
            try:
                # The first answer: the imports are done.
                await in_abandonable_thread(process.request, b"", (), self._import_seconds)
            except ForkServerLost as loss:
                reason = str(loss)
                if process.is_silent:  # an import hangs, and would hang again
                    self._modules = ()
                logger.error(  # noqa: TRY400 - the sentence is all there is to say
                    "The fork server has not imported its modules (%s): %s.",
                    ", ".join(modules) or "none",
                    reason,
                )
            except asyncio.CancelledError:
                await process.kill()
                raise
            else:
                process.is_ready = True
                return process
        raise OSError(f"The fork server does not start: {reason}")

    def _on_lost(self, process: "_Process", ended: "asyncio.Future[int]") -> None:
        if self._is_closed or ended.cancelled():  # the server ends
            return
        self._on_replaced()
        if process.is_ready:  # else `_start` continues
            logger.error("The fork server is replaced: %s. Its workers continue.", process.lost)
            if time.monotonic() - process.started_at > _STABLE_SECONDS:
                self.warm_up()


def _has_failed(starting: "asyncio.Task[_Process]") -> bool:
    """Return whether the start of a fork server has failed, or the fork server was lost since."""
    if not starting.done():
        return False
    return starting.cancelled() or bool(starting.exception()) or bool(starting.result().lost)


class _Process:
    """One process of the fork server. The constructor, `request` and `fork` block."""

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str] | None) -> None:
        self.started_at = time.monotonic()
        self.is_ready = False  # its imports are done
        self.is_silent = False  # it was killed because it did not answer in time
        self.lost = ""  # why it has ended, or is about to
        self._ended: asyncio.Future[int]
        #: One request at a time: the deadline of an answer does not include earlier requests.
        self._lock = threading.Lock()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ExitStack() as opened, theirs:
            opened.enter_context(ours)
            self._process = subprocess.Popen(  # noqa: S603 - this very interpreter
                command(sys.executable, theirs.fileno(), modules),
                env=environment,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
            opened.pop_all()
        self._sock = ours

    def watch(self) -> "asyncio.Future[int]":
        """Return a future that is done at its end."""
        self._ended = asyncio.ensure_future(in_abandonable_thread(self._wait))
        return self._ended

    def fork(self, spec: WorkerSpec) -> Started:
        """Fork a worker; raises OSError, ForkServerLost."""
        with ExitStack() as theirs, our_ends() as (ours, sock, their_sock, stacks):
            place = WorkerPlace(
                environment=dict(spec.environment),
                python_path=spec.python_path,
                model_dir=spec.model_dir,
                threads=spec.threads,
                stacks=stacks.path,
                terminal_of=os.getpid() if spec.terminal else 0,
            )
            outputs, descriptors = [], [their_sock.fileno()]
            for _ in range(2):
                reader, writer = os.pipe()
                outputs.append(ours.enter_context(os.fdopen(reader, "rb", buffering=0)))
                descriptors.append(writer)
                theirs.callback(os.close, writer)
            setup_writer, setup_reader = (
                theirs.enter_context(each) for each in socket.socketpair()
            )
            answer = self.request(b"fork", [*descriptors, setup_reader.fileno()])
            setup_reader.close()
            try:
                setup_writer.settimeout(_ANSWER_SECONDS)
                setup_writer.sendall(place.to_text().encode())
            except BaseException:
                self._kill_worker(answer)
                raise
            return Started(
                pid=answer.pid,
                sentinel=answer.sentinel,
                sock=sock,
                stdout=outputs[0],
                stderr=outputs[1],
                stacks=stacks,
                reap=partial(self._reap, answer),
                kill=partial(self._kill_worker, answer),
            )

    def request(
        self, text: bytes, descriptors: Sequence[int] = (), seconds: float | None = None
    ) -> _Answer:
        """Send a request and return its answer.

        Raises:
            ForkServerLost: It has ended, or was killed because it did not answer in time.
            OSError: It cannot do it.
        """
        with self._lock:
            if self.lost:  # the answer to an earlier request may still arrive
                raise ForkServerLost(self.lost)
            seconds = _ANSWER_SECONDS if seconds is None else seconds
            try:
                self._sock.settimeout(seconds)
                if text:
                    socket.send_fds(self._sock, [text], descriptors)
                data, received, flags, _ = socket.recv_fds(
                    self._sock, _MAX_ANSWER_BYTES, 1, socket.MSG_CMSG_CLOEXEC
                )
            except TimeoutError:
                self.is_silent = True
                raise self._lose(f"it did not answer within {seconds:g} s") from None
            except OSError as error:
                raise self._lose(str(error)) from error
            if not data:
                raise self._lose("it has ended")
        answer = _Answer(**json.loads(data), sentinel=received[0] if received else -1)
        if flags & socket.MSG_CTRUNC:
            self._kill_worker(answer)
            raise OSError("The fork server cannot do it: the frontend has used up its descriptors")
        if answer.error:
            raise OSError(f"The fork server cannot do it: {answer.error}")
        return answer

    async def kill(self) -> None:
        """Kill it, and wait a moment for its end."""
        self._lose("it was stopped")
        await asyncio.wait({self._ended}, timeout=_END_SECONDS)

    def discard(self) -> None:
        """Kill it, where it is not watched."""
        self._lose("it was stopped")
        self._wait()

    def _lose(self, reason: str) -> ForkServerLost:
        self.lost = self.lost or reason
        self._process.kill()
        return ForkServerLost(self.lost)

    def _wait(self) -> int:
        status = self._process.wait()
        self.lost = self.lost or "it has ended"
        with self._lock:  # a request in progress reads the end first
            self._sock.close()
        return status

    async def _reap(self, answer: _Answer) -> int | None:
        try:
            reaped = await in_abandonable_thread(self.request, str(answer.pid).encode())
        except (OSError, RuntimeError):  # the fork server is lost, or no thread can be started
            return None
        return reaped.status

    def _kill_worker(self, answer: _Answer) -> None:
        """Kill and reap a worker; the frontend's end of its socket is about to close."""
        if not answer.pid:
            return
        if answer.sentinel >= 0:
            with contextlib.suppress(OSError):  # it has ended, or pidfds are not available
                signal.pidfd_send_signal(answer.sentinel, signal.SIGKILL)
            os.close(answer.sentinel)
        threading.Thread(target=self._reap_quietly, args=(answer,), daemon=True).start()

    def _reap_quietly(self, answer: _Answer) -> None:
        with contextlib.suppress(OSError):
            self.request(str(answer.pid).encode())
