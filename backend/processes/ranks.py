"""The connections of the processes ("ranks") of one worker.

::

    frontend ═══ rank 0 ═══ rank 1
                    ╚══════ rank 2 …

Rank 0 has the connection to the frontend, which sees an ordinary worker. It passes the `Load` on to
the others, and answers when all have loaded the model. If all ranks take part in each batch (tensor
parallelism), it passes batches on, and is the only one to answer; otherwise (pipelines) the others
wait in their handler. When a rank ends, the connections between ranks close and the runner ends the
others.
"""

import contextlib
import dataclasses
import logging
import select
import socket
import threading
from collections.abc import Sequence

from marserve.backend.connection import FrontendConnection
from marserve.backend.protocol import (
    EndSequence,
    Load,
    Loaded,
    LoadFailure,
    Message,
    Predict,
    ProtocolError,
    Trials,
)

logger = logging.getLogger(__name__)


def connection_of(
    rank: int, sockets: Sequence[socket.socket], *, to_all: bool
) -> FrontendConnection:
    """Return the connection of a rank; with ``to_all`` all of them take part in each batch."""
    upstream, *followers = sockets
    if rank:
        return FollowerConnection(upstream, rank)
    return LeaderConnection(upstream, followers, to_all=to_all)


def _on_own_device(load: Load, rank: int) -> Load:
    """Return the load for a rank; ranks see the worker's devices only, one for each."""
    return load if load.gpu_id is None else dataclasses.replace(load, gpu_id=rank)


class FollowerConnection(FrontendConnection):
    """The connection of any rank but the first, to the first."""

    def __init__(self, sock: socket.socket, rank: int) -> None:
        super().__init__(sock)
        self._rank = rank

    def receive(self) -> Message | None:
        """Wait for the next message."""
        message = super().receive()
        return _on_own_device(message, self._rank) if isinstance(message, Load) else message

    def send(self, message: Message) -> None:
        """Send the answer to the load; everything else is sent by rank 0 only."""
        if isinstance(message, Loaded | LoadFailure):
            super().send(message)


class LeaderConnection(FrontendConnection):
    """The connection of rank 0."""

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
        """Send a message; `Loaded` when all ranks have loaded the model.

        Raises:
            ConnectionError: Another rank has not loaded it, which the frontend has been sent.
        """
        if isinstance(message, LoadFailure):
            self._report_failure(message)
            return
        if isinstance(message, Loaded):
            for thread in self._loads:
                thread.join()
            if self._failed:
                raise ConnectionError("another rank has not loaded the model")
        super().send(message)

    def _wait(self) -> None:
        while not self._inbox:
            ready = [descriptor for descriptor, _ in self._readable.poll()]
            for descriptor in ready:
                if descriptor in self._ranks:
                    raise ConnectionError(f"rank {self._ranks[descriptor]} has ended")
            if ready:
                return

    def _receive_load(self, load: Load) -> Load | None:
        trials, is_shared = load.trials, self._to_all and bool(self._followers)
        setting = "asyncCommunication" if load.asynchronous else ""
        if trials.must_validate and trials.validated_sizes:
            setting = setting or "validateBatching"
        if is_shared and setting:
            reason = f"{setting} cannot be used where all ranks take part in each batch"
            super().send(LoadFailure(500, reason, permanent=True))
            return None
        without_trials = dataclasses.replace(load, trials=Trials())
        self._pass_on(without_trials)
        for rank, follower in enumerate(self._followers, 1):
            thread = threading.Thread(target=self._await_load, args=(rank, follower), daemon=True)
            self._loads.append(thread)
            thread.start()
        if is_shared and (trials.threads or trials.sizes or trials.validated_sizes):
            # By its own clock and memory each rank would stop at another batch, and the others
            # would wait for it in the middle of theirs.
            logger.info("No batches are tried where all ranks take part in each batch.")
            load = without_trials
        return _on_own_device(load, 0)

    def _pass_on(self, message: Message) -> None:
        for follower in self._followers:
            follower.send(message)

    def _await_load(self, rank: int, follower: FrontendConnection) -> None:
        """Report the failure of a rank at once: this one may be waiting for it."""
        try:
            answer = follower.receive()
        except (ProtocolError, OSError):
            answer = None
        if answer is None:
            answer = LoadFailure(500, f"Rank {rank} ended while the model was loaded")
        if isinstance(answer, LoadFailure):
            self._report_failure(answer)

    def _report_failure(self, failure: LoadFailure) -> None:
        """Send the first failure to the frontend, which then ends this process."""
        with self._failing:
            is_first, self._failed = not self._failed, True
        if is_first:
            with contextlib.suppress(OSError):  # it has closed the connection
                super().send(failure)
