"""Workers that are forked by a fork server, which has torch imported already: the usual way.

Starting or replacing a worker costs little more than loading its weights. The frontend itself never
forks: its descriptors would leak into the child.

The fork server is our own and not multiprocessing's, because that can only be waited for in threads
without a deadline, and its workers count as dead with it. This one answers to the event loop
(`backend.processes.fork_server`); the end of a worker is seen by a pidfd, whoever its parent is.
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

from marserve.backend.processes.fork_server import WorkerSetup, command
from marserve.frontend.aio.background import in_abandonable_thread, start_in_thread
from marserve.frontend.workers.launchers.launcher import WorkerSpec
from marserve.frontend.workers.launchers.local_process import Started, our_ends

logger = logging.getLogger(__name__)

# How long an answer may take, which costs a fork at most: 15 ms on an idle machine.
_ANSWER_SECONDS = 2.0
# How long the fork server may take to end once it was killed.
_END_SECONDS = 1.0
_MAX_ANSWER_BYTES = 1024
# One that lived shorter is replaced when it is needed, and not at once.
_SOUND_SECONDS = 10.0
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
    """Starts workers, by a fork server that is replaced when it has ended or does not answer.

    ``modules`` are imported once for all workers, as far as that can be done; a fork server that
    has not imported them after ``import_seconds`` is replaced by one without them. ``on_replaced``
    is called for each one that was lost. ``environment`` is its own: what libraries read of it when
    they are imported holds for its workers, whatever theirs is.
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
        #: Ends with a fork server that has answered; made anew when that is lost.
        self._running: asyncio.Task[_Process] | None = None
        self._is_closed = False

    def warm_up(self) -> None:
        """Start the fork server, if there is none."""
        process = self._begun()
        if process is not None and process.is_lost:
            self._running = None
        if self._running is None and not self._is_closed:
            self._running = asyncio.create_task(self._begin(), name="fork server")
            self._running.add_done_callback(self._on_begun)

    async def start(self, spec: WorkerSpec) -> Started:
        """Start a worker; if the fork server is lost in between, by the next one.

        Raises:
            OSError: It could not be started.
        """
        try:
            return await (await self._process()).fork(spec)
        except ForkServerLost:
            return await (await self._process()).fork(spec)

    async def close(self) -> None:
        """End the fork server; its workers must have ended."""
        self._is_closed = True
        running, self._running = self._running, None
        if running is None:
            return
        running.cancel()
        await asyncio.wait({running})  # its end takes no longer than that of its process
        if not running.cancelled() and running.exception() is None:
            await running.result().kill()

    def _begun(self) -> "_Process | None":
        """The fork server that has answered last, lost or not; None while another one begins."""
        running = self._running
        if running is None or not running.done() or running.cancelled() or running.exception():
            return None
        return running.result()

    async def _process(self) -> "_Process":
        self.warm_up()
        if self._running is None:
            raise ForkServerLost("the server is stopping")
        return await asyncio.shield(self._running)  # no deadline: `_begin` has one

    def _on_begun(self, begun: "asyncio.Task[_Process]") -> None:
        if not begun.cancelled() and begun.exception() is not None and self._running is begun:
            self._running = None  # whoever needs one next tries again

    async def _begin(self) -> "_Process":
        """Start a fork server and wait for its imports: the second time, or without them."""
        reason = ""
        for attempt in range(_TRIES):
            modules = self._modules if attempt < _TRIES - 1 else ()
            process = await _Process.start(modules, self._environment, self._on_lost)
            try:
                await process.ready(self._import_seconds)
            except ForkServerLost as loss:
                reason = str(loss)
                if process.is_silent:  # it would be the next time
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
                return process
        raise OSError(f"There is no fork server: {reason}")

    def _on_lost(self, process: "_Process", reason: str) -> None:
        if self._is_closed:
            return
        self._on_replaced()
        if self._begun() is not process:  # it was lost while it began, and `_begin` knows
            return
        logger.error("The fork server is replaced: %s. Its workers go on.", reason)
        if time.monotonic() - process.began > _SOUND_SECONDS:
            self.warm_up()


class _Process:
    """One process of the fork server; answers come in the order of requests."""

    def __init__(
        self,
        process: "subprocess.Popen[bytes]",
        sock: socket.socket,
        on_lost: Callable[["_Process", str], object],
    ) -> None:
        self.began = time.monotonic()
        self.is_silent = False
        self._process = process
        self._sock = sock
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self.is_lost = False
        self._ending: asyncio.Future[int]
        #: What is due: the first is that its imports are done.
        self._ready: asyncio.Future[_Answer] = self._loop.create_future()
        #: One after the other: the deadline of a request is not for those in front of it.
        self._turn = asyncio.Lock()
        self._due = deque([self._ready])
        self._loop.add_reader(sock.fileno(), self._receive)

    @classmethod
    async def start(
        cls,
        modules: Sequence[str],
        environment: Mapping[str, str] | None,
        on_lost: Callable[["_Process", str], object],
    ) -> "_Process":
        """Start an interpreter; raises OSError."""
        started = await start_in_thread(_start, modules, environment, discard=_discard)
        return cls(*started, on_lost)

    async def ready(self, seconds: float) -> None:
        """Wait until its imports are done; raises ForkServerLost."""
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
            answer = await self._ask(b"fork", *descriptors, setup_reader.fileno())
            setup_reader.close()
            try:
                await self._tell(setup_writer, setup.to_bytes())
            except BaseException:
                self.discard(answer)
                raise
            return Started(_Child(self, answer), sock, outputs[0], outputs[1], stacks)

    async def _tell(self, sock: socket.socket, data: bytes) -> None:
        """Send something to a worker; nobody waits where it is not larger than usual."""
        sock.setblocking(False)
        async with asyncio.timeout(_ANSWER_SECONDS):
            await self._loop.sock_sendall(sock, data)

    async def reap(self, pid: int) -> int:
        """Reap a worker that has ended; returns its exit status. Raises OSError."""
        return (await self._ask(str(pid).encode())).status

    def discard(self, answer: _Answer) -> None:
        """Make sure that a worker ends, and is reaped; our end of its socket is about to close."""
        if not answer.pid:
            return
        if answer.sentinel >= 0:
            with contextlib.suppress(OSError):  # it has ended already; or there are no pidfds
                signal.pidfd_send_signal(answer.sentinel, signal.SIGKILL)
            os.close(answer.sentinel)
        with contextlib.suppress(OSError):
            self._request(str(answer.pid).encode()).cancel()

    async def kill(self) -> None:
        """End it, and wait for that as long as it usually takes."""
        self._lose("it was stopped")
        await asyncio.wait({self._ending}, timeout=_END_SECONDS)

    async def _ask(self, request: bytes, *descriptors: int) -> _Answer:
        async with self._turn:
            due = self._request(request, *descriptors)
            answer = await self._answer_within(due, _ANSWER_SECONDS)
        if answer.error:
            raise OSError(f"The fork server cannot do it: {answer.error}")
        return answer

    def _request(self, request: bytes, *descriptors: int) -> "asyncio.Future[_Answer]":
        if self.is_lost:
            raise ForkServerLost("it has ended")
        try:
            socket.send_fds(self._sock, [request], descriptors)
        except OSError as error:  # it has ended, or has not read for long
            self._lose(str(error))
            raise ForkServerLost(str(error)) from error
        answer: asyncio.Future[_Answer] = self._loop.create_future()
        self._due.append(answer)
        return answer

    async def _answer_within(self, answer: "asyncio.Future[_Answer]", seconds: float) -> _Answer:
        try:
            await asyncio.wait({answer}, timeout=seconds)
        except asyncio.CancelledError:
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                self.discard(answer.result())
            answer.cancel()
            raise
        if not answer.done():  # it may be there: this process may have been held up itself
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
            due = self._due.popleft()
            if flags & socket.MSG_CTRUNC:
                self.discard(answer)
                answer = _Answer(error="there is no descriptor left")
            if due.cancelled():
                self.discard(answer)
            else:
                due.set_result(answer)

    def _lose(self, reason: str) -> None:
        if self.is_lost:
            return
        self.is_lost = True
        self._loop.remove_reader(self._sock.fileno())
        self._sock.close()
        self._process.kill()  # it may be stopped: SIGKILL is heard all the same
        self._ending = asyncio.ensure_future(in_abandonable_thread(self._process.wait))
        for each in self._due:
            if not each.done():
                each.set_exception(ForkServerLost(reason))
                each.exception()  # nobody may be waiting
        self._due.clear()
        self._on_lost(self, reason)


def _start(
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


class _Child:
    """A worker that was forked."""

    def __init__(self, parent: _Process, answer: _Answer) -> None:
        self.pid = answer.pid
        self.sentinel = answer.sentinel
        self._parent = parent
        self._answer = answer

    async def reap(self) -> int | None:
        """See `Child.reap`: not known if the fork server has ended."""
        try:
            return await self._parent.reap(self.pid)
        except OSError:
            return _status_of_orphan(self.sentinel)
        finally:
            os.close(self.sentinel)

    def discard(self) -> None:
        """See `Child.discard`."""
        self._parent.discard(self._answer)


def _status_of_orphan(sentinel: int) -> int | None:
    """The exit status of a worker without a parent: ours to know in a container, as process 1."""
    with contextlib.suppress(OSError):
        end = os.waitid(os.P_PIDFD, sentinel, os.WEXITED | os.WNOHANG)
        if end is not None:
            return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
    return None
