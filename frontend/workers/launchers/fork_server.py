"""Starts workers by a fork server that has imported torch; the usual way.

Starting or replacing a worker then costs little more than loading its weights. The frontend itself
never forks: its descriptors would leak into the child.

The fork server is not multiprocessing's: that one can only be awaited in threads without a
deadline, and its workers count as dead when it dies.
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
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from marserve.backend.processes.fork_server import WorkerSetup, command
from marserve.frontend.aio.background import in_abandonable_thread, start_in_thread
from marserve.frontend.workers.launchers.local_process import Started, our_ends
from marserve.frontend.workers.launchers.worker_spec import WorkerSpec

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
            return await (await self._process()).fork(spec)
        except ForkServerLost:
            return await (await self._process()).fork(spec)

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

    async def _process(self) -> "_Process":
        self.warm_up()
        if self._starting is None:
            raise ForkServerLost("the server is stopping")
        return await asyncio.shield(self._starting)  # `_start` has deadlines

    async def _start(self) -> "_Process":
        reason = ""
        for attempt in range(_TRIES):
            modules = self._modules if attempt < _TRIES - 1 else ()
            process = await _Process.start(modules, self._environment, self._on_lost)
            try:
                await process.ready(self._import_seconds)
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

    def _on_lost(self, process: "_Process", reason: str) -> None:
        if self._is_closed:
            return
        self._on_replaced()
        if process.is_ready:  # else `_start` continues
            logger.error("The fork server is replaced: %s. Its workers continue.", reason)
            if time.monotonic() - process.started_at > _STABLE_SECONDS:
                self.warm_up()


def _has_failed(starting: "asyncio.Task[_Process]") -> bool:
    """Return whether the start of a fork server has failed, or the fork server was lost since."""
    if not starting.done():
        return False
    return starting.cancelled() or bool(starting.exception()) or starting.result().is_lost


class _Process:
    """One process of the fork server; answers come in the order of requests."""

    def __init__(
        self,
        process: "subprocess.Popen[bytes]",
        sock: socket.socket,
        on_lost: Callable[["_Process", str], object],
    ) -> None:
        self.started_at = time.monotonic()
        self.is_ready = False  # its imports are done
        self.is_silent = False  # it was killed because it did not answer in time
        self.is_lost = False
        self._process = process
        self._sock = sock
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._ending: asyncio.Future[int]
        #: The first answer: the imports are done.
        self._ready: asyncio.Future[_Answer] = self._loop.create_future()
        self._awaited = deque([self._ready])
        #: One request at a time: the deadline of an answer does not include earlier requests.
        self._lock = asyncio.Lock()
        self._loop.add_reader(sock.fileno(), self._receive)

    @classmethod
    async def start(
        cls,
        modules: Sequence[str],
        environment: Mapping[str, str] | None,
        on_lost: Callable[["_Process", str], object],
    ) -> "_Process":
        """Start an interpreter."""
        started = await start_in_thread(_spawn, modules, environment, discard=_discard)
        return cls(*started, on_lost)

    async def ready(self, seconds: float) -> None:
        """Wait until its imports are done."""
        await self._answer_within(self._ready, seconds)

    async def fork(self, spec: WorkerSpec) -> Started:
        """Fork a worker; raises OSError, ForkServerLost."""
        with ExitStack() as theirs, our_ends() as (ours, sock, their_sock, stacks):
            setup = WorkerSetup(
                environment=spec.environment,
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
            answer = await self._request(b"fork", *descriptors, setup_reader.fileno())
            setup_reader.close()
            try:
                setup_writer.setblocking(False)
                async with asyncio.timeout(_ANSWER_SECONDS):
                    await self._loop.sock_sendall(setup_writer, setup.to_bytes())
            except BaseException:
                self.discard(answer)
                raise
            return Started(
                pid=answer.pid,
                sentinel=answer.sentinel,
                sock=sock,
                stdout=outputs[0],
                stderr=outputs[1],
                stacks=stacks,
                reap=partial(self._reap, answer),
                kill=partial(self.discard, answer),
            )

    async def _reap(self, answer: _Answer) -> int | None:
        try:
            return (await self._request(str(answer.pid).encode())).status
        except OSError:
            return None

    def discard(self, answer: _Answer) -> None:
        """Kill and reap a worker; the frontend's end of its socket is about to close."""
        if not answer.pid:
            return
        if answer.sentinel >= 0:
            with contextlib.suppress(OSError):  # it has ended, or pidfds are not available
                signal.pidfd_send_signal(answer.sentinel, signal.SIGKILL)
            os.close(answer.sentinel)
        with contextlib.suppress(OSError):
            self._send(str(answer.pid).encode()).cancel()

    async def kill(self) -> None:
        """Kill it, and wait a moment for its end."""
        self._lose("it was stopped")
        await asyncio.wait({self._ending}, timeout=_END_SECONDS)

    async def _request(self, request: bytes, *descriptors: int) -> _Answer:
        async with self._lock:
            awaited = self._send(request, *descriptors)
            answer = await self._answer_within(awaited, _ANSWER_SECONDS)
        if answer.error:
            raise OSError(f"The fork server cannot do it: {answer.error}")
        return answer

    def _send(self, request: bytes, *descriptors: int) -> "asyncio.Future[_Answer]":
        if self.is_lost:
            raise ForkServerLost("it has ended")
        try:
            socket.send_fds(self._sock, [request], descriptors)
        except OSError as error:  # it has ended, or does not read
            self._lose(str(error))
            raise ForkServerLost(str(error)) from error
        answer: asyncio.Future[_Answer] = self._loop.create_future()
        self._awaited.append(answer)
        return answer

    async def _answer_within(self, answer: "asyncio.Future[_Answer]", seconds: float) -> _Answer:
        try:
            await asyncio.wait({answer}, timeout=seconds)
        except asyncio.CancelledError:
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                self.discard(answer.result())
            answer.cancel()
            raise
        if not answer.done():  # the answer may be here: this process may have been stopped itself
            self._receive()
        if not answer.done():
            self.is_silent = True
            self._lose(f"it did not answer within {seconds:g} s")
        return answer.result()

    def _receive(self) -> None:
        while not self.is_lost:
            try:
                data, descriptors, flags, _ = socket.recv_fds(
                    self._sock, _MAX_ANSWER_BYTES, 1, socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return
            except OSError as error:
                self._lose(str(error))
                return
            if not data:
                self._lose("it has ended")
                return
            answer = _Answer(**json.loads(data), sentinel=descriptors[0] if descriptors else -1)
            awaited = self._awaited.popleft()
            if flags & socket.MSG_CTRUNC:
                self.discard(answer)
                answer = _Answer(error="the frontend has used up its descriptors")
            if awaited.cancelled():
                self.discard(answer)
            else:
                awaited.set_result(answer)

    def _lose(self, reason: str) -> None:
        if self.is_lost:
            return
        self.is_lost = True
        self._loop.remove_reader(self._sock.fileno())
        self._sock.close()
        self._process.kill()
        self._ending = asyncio.ensure_future(in_abandonable_thread(self._process.wait))
        for each in self._awaited:
            if not each.done():
                each.set_exception(ForkServerLost(reason))
                each.exception()  # else asyncio logs those that no task awaits
        self._awaited.clear()
        self._on_lost(self, reason)


def _spawn(
    modules: Sequence[str], environment: Mapping[str, str] | None
) -> "tuple[subprocess.Popen[bytes], socket.socket]":
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ExitStack() as opened, theirs:
        opened.enter_context(ours)
        process = subprocess.Popen(  # noqa: S603 - this very interpreter
            command(sys.executable, theirs.fileno(), modules),
            env=environment,
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
        opened.pop_all()
    ours.setblocking(False)
    return process, ours


def _discard(started: "tuple[subprocess.Popen[bytes], socket.socket]") -> None:
    process, sock = started
    sock.close()
    process.kill()
    process.wait()
