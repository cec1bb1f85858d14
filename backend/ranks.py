"""The wires of the processes ("ranks") of one worker, and how a batch gets to all of them.

::

    frontend ═══ rank 0 ═══ rank 1
                    ╚══════ rank 2 …

Rank 0 holds the wire to the frontend, so the frontend sees an ordinary worker. It passes every
`Load` on to the others and answers when all of them are loaded; it passes batches on where all take
part in them (tensor parallelism), and alone answers those. Where it does not (pipelines), the
others sit in what their handler has started. Whichever rank ends takes all others with it: the
wires between them close, and the runner that started them ends the rest.

Nobody inherits a wire through a runner, so each rank fetches its own from the runner's process: at
an abstract Unix socket (no file to leave behind), which gives each rank's wire once, and only to
processes of the same user. A rank that the runner restarts by itself finds nobody there and ends:
the frontend restarts the whole worker instead.
"""

import contextlib
import ctypes
import dataclasses
import logging
import os
import select
import signal
import socket
import struct
import threading
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from marserve.backend.ends import FirstEnd
from marserve.backend.protocol import Load, Message, Predict, ProtocolError, Reply
from marserve.backend.wire import Wire

logger = logging.getLogger(__name__)

_MOST_WIRES = 250  # the kernel takes 253 descriptors in one message
_LONGEST_TEXT_BYTES = 1 << 20
_HELLO_SECONDS = 10.0
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


def outlive_no_parent() -> None:
    """Have the kernel kill this process when its parent, the runner, is gone."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def tend_orphans() -> None:
    """Have what a dead rank leaves behind become our child, so that the frontend finds it."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


# -- in the runner's process -----------------------------------------------------------------------


def offer_wires(
    text: str, wire: socket.socket, ranks: int, *, to_all: bool, first_end: FirstEnd | None = None
) -> str:
    """Keep the wires of all ranks ready for them to fetch, in a thread.

    Args:
        text: What every rank is told.
        wire: The one to the frontend.
        ranks: How many there will be.
        to_all: Whether all of them take part in each batch.
        first_end: Is to watch them.

    Returns:
        The address where they are.

    Raises:
        ValueError: That is more ranks than can be served.
    """
    if ranks > _MOST_WIRES:
        raise ValueError(f"{ranks} processes, at most {_MOST_WIRES} can work together")
    address = uuid.uuid4().hex
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(_name(address))
    listener.listen(ranks)
    offer = _Offer(text, _bundles(wire, ranks, to_all), first_end or FirstEnd())
    threading.Thread(target=offer.hand_out, args=(listener,), daemon=True).start()
    return address


def _name(address: str) -> str:
    return f"\0marserve-{address}"


@dataclass(frozen=True)
class _Bundle:
    """A rank's sockets, and the letter that says what they are.

    The letter is ``L`` for rank 0 where it passes batches on, ``l`` where it does not, ``m`` for
    the other ranks. The first socket is the one messages come by, the others lead to the ranks.
    """

    letter: str
    sockets: Sequence[socket.socket]

    def close(self) -> None:
        for each in self.sockets:
            each.close()


def _bundles(wire: socket.socket, ranks: int, to_all: bool) -> dict[int, _Bundle]:
    pairs = [socket.socketpair() for _ in range(ranks - 1)]
    first = _Bundle("L" if to_all else "l", [wire, *(ours for ours, _ in pairs)])
    others = {rank: _Bundle("m", [theirs]) for rank, (_, theirs) in enumerate(pairs, 1)}
    return {0: first, **others}


class _Offer:
    def __init__(self, text: str, bundles: dict[int, _Bundle], first_end: FirstEnd) -> None:
        self._text = text
        self._bundles = bundles
        self._first_end = first_end

    def hand_out(self, listener: socket.socket) -> None:
        # No deadline: the frontend's patience for a start ends this process, if nothing else does.
        with listener:
            while self._bundles:
                visitor, _ = listener.accept()
                with visitor:
                    self._serve(visitor)

    def _serve(self, visitor: socket.socket) -> None:
        pid, owner = _peer(visitor)
        if owner != os.geteuid():
            return
        visitor.settimeout(_HELLO_SECONDS)
        try:
            bundle = self._bundles.pop(int(visitor.recv(16)), None)
            if bundle is not None:
                self._first_end.watch(pid)
                letter = f"{bundle.letter}{self._text}".encode()
                socket.send_fds(visitor, [letter], [one.fileno() for one in bundle.sockets])
                bundle.close()
        except (OSError, ValueError):  # its visitor is gone, and the runner will say so
            return


def _peer(visitor: socket.socket) -> tuple[int, int]:
    """Process and user."""
    credentials = visitor.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(credentials)
    return pid, uid


# -- in the ranks ----------------------------------------------------------------------------------


def fetch_wire(address: str, rank: int) -> tuple[str, Wire]:
    """Fetch the text for all ranks, and this one's wire.

    Raises:
        OSError: Nobody is there, or nothing for this rank.
    """
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(_name(address))
        sock.sendall(str(rank).encode())
        data, descriptors, _, _ = socket.recv_fds(sock, _LONGEST_TEXT_BYTES, _MOST_WIRES)
    if not descriptors:
        raise OSError(f"there is no wire for rank {rank}, or it was taken before")
    for each in descriptors:
        os.set_inheritable(each, False)
    upstream, *others = (socket.socket(fileno=each) for each in descriptors)
    letter, text = chr(data[0]), data[1:].decode()
    if letter == "m":
        return text, FollowerWire(upstream, rank)
    return text, LeaderWire(upstream, others, to_all=letter == "L")


def _on_own_device(load: Load, rank: int) -> Load:
    """A worker's devices are the only ones its ranks see, so each rank's has the rank's number."""
    return load if load.gpu_id is None else dataclasses.replace(load, gpu_id=rank)


class FollowerWire(Wire):
    """The wire of any rank but the first: its leader hears of the load, and of nothing else."""

    def __init__(self, sock: socket.socket, rank: int) -> None:
        super().__init__(sock)
        self._rank = rank
        self._told = False

    def receive(self) -> Message | None:
        """See `Wire.receive`."""
        message = super().receive()
        return _on_own_device(message, self._rank) if isinstance(message, Load) else message

    def send(self, message: Message) -> None:
        """Send the reply to the load; those to batches are rank 0's to give."""
        if not self._told:
            self._told = True
            super().send(message)


class LeaderWire(Wire):
    """The wire of rank 0.

    Args:
        sock: Its end of the wire to the frontend.
        followers: Its ends of the wires to the other ranks, in order.
        to_all: Whether they take part in each batch.
    """

    def __init__(
        self, sock: socket.socket, followers: Sequence[socket.socket], *, to_all: bool
    ) -> None:
        super().__init__(sock)
        self._followers = [Wire(one) for one in followers]
        self._ranks = {one.fileno(): rank for rank, one in enumerate(followers, 1)}
        self._to_all = to_all
        self._loads: list[threading.Thread] = []
        self._failing = threading.Lock()
        self._failed = False
        self._mouths = select.poll()
        for one in (sock, *followers):
            self._mouths.register(one, select.POLLIN)

    def receive(self) -> Message | None:
        """Wait for the next message, and pass it on to those whom it concerns.

        Raises:
            ProtocolError, ConnectionError: As `Wire.receive`; also when another rank has ended.
        """
        self._watch()
        message = super().receive()
        if isinstance(message, Load):
            return self._receive_load(message)
        if self._to_all and isinstance(message, Predict):
            self._pass_on(message)
        return message

    def send(self, message: Message) -> None:
        """Answer the frontend; a load that succeeded here, when it has in all ranks.

        Raises:
            ConnectionError: It has not in another one, and the frontend has been told so.
        """
        if self._loads:
            if isinstance(message, Reply) and message.code != 200:
                self._tell_failure(message)
                return
            while self._loads:
                self._loads.pop().join()
        if self._failed:
            raise ConnectionError("another rank has not loaded the model")
        super().send(message)

    def _watch(self) -> None:
        """Wait until the frontend has something to say."""
        while not self._inbox:
            ready = [descriptor for descriptor, _ in self._mouths.poll()]
            for descriptor in ready:
                if descriptor in self._ranks:
                    raise ConnectionError(f"rank {self._ranks[descriptor]} has ended")
            if ready:
                return

    def _receive_load(self, load: Load) -> Load | None:
        if load.asynchronous and self._to_all and self._followers:
            reason = "asyncCommunication cannot be used where all ranks take part in each batch"
            super().send(Reply(500, reason, incurable=True))
            return None
        alone = dataclasses.replace(load, sweep_sizes=[])
        self._pass_on(alone)
        for rank, wire in enumerate(self._followers, 1):
            thread = threading.Thread(target=self._await_load, args=(rank, wire), daemon=True)
            self._loads.append(thread)
            thread.start()
        if load.sweep_sizes and self._to_all and self._followers:
            # Each would stop the sweep by a clock and a memory of its own, and leave the others
            # waiting for it in the middle of a batch.
            logger.info("Batch sizes are not swept where all ranks take part in each batch.")
            load = alone
        return _on_own_device(load, 0)

    def _pass_on(self, message: Message) -> None:
        for wire in self._followers:
            wire.send(message)

    def _await_load(self, rank: int, wire: Wire) -> None:
        """Pass on the reason of a rank that does not load, now: this one may be waiting for it."""
        try:
            reply = wire.receive()
        except (ProtocolError, OSError):
            reply = None
        if reply is None:
            reply = Reply(500, f"Rank {rank} ended while the model was loaded")
        if isinstance(reply, Reply) and reply.code != 200:
            self._tell_failure(reply)

    def _tell_failure(self, reply: Reply) -> None:
        """Tell the frontend the first reason why the model is not loaded; it ends us then."""
        with self._failing:
            first, self._failed = not self._failed, True
        if first:
            with contextlib.suppress(OSError):  # it has left already
                super().send(reply)
