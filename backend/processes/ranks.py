"""The connections of the processes ("ranks") of one worker, and how a batch gets to all of them.

::

    frontend ═══ rank 0 ═══ rank 1
                    ╚══════ rank 2 …

Rank 0 holds the connection to the frontend, so the frontend sees an ordinary worker. It passes
every `Load` on to the others and answers when all of them are loaded; it passes batches on where
all take part in them (tensor parallelism), and alone answers those. Where it does not (pipelines),
the others sit in what their handler has started. Whichever rank ends takes all others with it: the
connections between them close, and the runner that started them ends the rest.
"""

import contextlib
import dataclasses
import logging
import select
import socket
import threading
from collections.abc import Sequence

from marserve.backend.connection import FrontendConnection
from marserve.backend.processes.runner import fetch_sockets
from marserve.backend.protocol import EndSequence, Load, Message, Predict, ProtocolError, Reply

logger = logging.getLogger(__name__)


def fetch_connection(address: str, rank: int) -> tuple[str, FrontendConnection]:
    """Fetch the text for all ranks, and make the connection of this one."""
    text, upstream, followers, to_all = fetch_sockets(address, rank)
    if rank:
        return text, FollowerConnection(upstream, rank)
    return text, LeaderConnection(upstream, followers, to_all=to_all)


def _on_own_device(load: Load, rank: int) -> Load:
    """A worker's devices are the only ones its ranks see, so each rank's has the rank's number."""
    return load if load.gpu_id is None else dataclasses.replace(load, gpu_id=rank)


class FollowerConnection(FrontendConnection):
    """Of any rank but the first: its leader hears of the load, and of nothing else."""

    def __init__(self, sock: socket.socket, rank: int) -> None:
        super().__init__(sock)
        self._rank = rank
        self._has_replied = False

    def receive(self) -> Message | None:
        """See `FrontendConnection.receive`."""
        message = super().receive()
        return _on_own_device(message, self._rank) if isinstance(message, Load) else message

    def announce_load(self) -> None:
        """Send nothing: only rank 0 announces."""

    def send(self, message: Message) -> None:
        """Send the reply to the load; those to batches are rank 0's to give."""
        if not self._has_replied:
            self._has_replied = True
            super().send(message)


class LeaderConnection(FrontendConnection):
    """Of rank 0; with ``to_all`` the other ranks, in order, take part in each batch."""

    def __init__(
        self, sock: socket.socket, followers: Sequence[socket.socket], *, to_all: bool
    ) -> None:
        super().__init__(sock)
        self._followers = [FrontendConnection(each) for each in followers]
        self._ranks = {each.fileno(): rank for rank, each in enumerate(followers, 1)}
        self._to_all = to_all
        self._loads: list[threading.Thread] = []
        self._failing = threading.Lock()
        self._failed = False
        self._readable = select.poll()
        for each in (sock, *followers):
            self._readable.register(each, select.POLLIN)

    def receive(self) -> Message | None:
        """Wait for the next message, and pass it on; ConnectionError if another rank has ended."""
        self._wait()
        message = super().receive()
        if isinstance(message, Load):
            return self._receive_load(message)
        if self._to_all and isinstance(message, Predict | EndSequence):
            self._pass_on(message)
        return message

    def send(self, message: Message) -> None:
        """Answer the frontend; a load that succeeded here, when it has in all ranks.

        ConnectionError says that it has not, and that the frontend knows.
        """
        if self._loads:
            if isinstance(message, Reply) and message.code != 200:
                self._report_failure(message)
                return
            while self._loads:
                self._loads.pop().join()
        if self._failed:
            raise ConnectionError("another rank has not loaded the model")
        super().send(message)

    def _wait(self) -> None:
        """Wait until the frontend has something to say; like `receive`, without a deadline."""
        while not self._inbox:
            ready = [descriptor for descriptor, _ in self._readable.poll()]
            for descriptor in ready:
                if descriptor in self._ranks:
                    raise ConnectionError(f"rank {self._ranks[descriptor]} has ended")
            if ready:
                return

    def _receive_load(self, load: Load) -> Load | None:
        if load.asynchronous and self._to_all and self._followers:
            reason = "asyncCommunication cannot be used where all ranks take part in each batch"
            super().send(Reply(500, reason, permanent=True))
            return None
        alone = dataclasses.replace(load, profiled_sizes=[], validated_sizes=[])
        self._pass_on(alone)
        for rank, follower in enumerate(self._followers, 1):
            thread = threading.Thread(target=self._await_load, args=(rank, follower), daemon=True)
            self._loads.append(thread)
            thread.start()
        if load.profiled_sizes and self._to_all and self._followers:
            # Each would stop it by a clock and a memory of its own, and leave the others
            # waiting for it in the middle of a batch.
            logger.info("Batch sizes are not profiled where all ranks take part in each batch.")
            load = alone
        return _on_own_device(load, 0)

    def _pass_on(self, message: Message) -> None:
        for follower in self._followers:
            follower.send(message)

    def _await_load(self, rank: int, follower: FrontendConnection) -> None:
        """Pass on the reason of a rank that does not load, now: this one may be waiting for it."""
        try:
            reply = follower.receive()
        except (ProtocolError, OSError):
            reply = None
        if reply is None:
            reply = Reply(500, f"Rank {rank} ended while the model was loaded")
        if isinstance(reply, Reply) and reply.code != 200:
            self._report_failure(reply)

    def _report_failure(self, reply: Reply) -> None:
        """Tell the frontend the first reason why the model is not loaded; it ends us then."""
        with self._failing:
            first, self._failed = not self._failed, True
        if first:
            with contextlib.suppress(OSError):  # it has left already
                super().send(reply)
