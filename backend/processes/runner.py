"""The process of a runner (torchrun, torch's launcher for CPUs), which starts those of one worker.

Sockets cannot be inherited through a runner, so each of its processes ("ranks") fetches its socket
from the runner's process: at an abstract Unix socket (without a file), which serves each rank once,
and processes of the same user only. A rank that the runner restarts cannot connect and ends: the
frontend restarts the whole worker instead.

A runner that has lost a process ends the others, and itself with exit status 1. Here it ends in the
same way as the first process that failed, so that the frontend sees the cause.
"""

import contextlib
import ctypes
import os
import resource
import signal
import socket
import struct
import sys
import threading
import uuid
from collections.abc import Callable, Sequence

_MAX_SOCKETS = 250  # the kernel takes 253 descriptors in one message
_ABSTRACT = "\0marserve-"  # no file: such names begin with a zero
_MAX_TEXT_BYTES = 1 << 20
_HELLO_SECONDS = 10.0
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent has ended."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def become_subreaper() -> None:
    """Make descendants that have lost their parent children of this process."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


class FirstFailure:
    """How the first child that failed ended; it is mostly the cause for the others."""

    def __init__(self) -> None:
        self._statuses: list[int] = []  # of the failed children, appended by one thread per child

    def watch(self, pid: int) -> threading.Thread:
        """Note how a child ends, in the returned thread, without reaping it."""
        thread = threading.Thread(target=self._watch, args=(pid,), daemon=True)
        thread.start()
        return thread

    def exit_alike(self) -> None:
        """End this process in the same way; returns if no child failed."""
        status = next(iter(self._statuses), 0)
        if status > 0:
            sys.exit(status)
        if status < 0:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the child has left its core already
            with contextlib.suppress(OSError):  # SIGKILL cannot have a handler
                signal.signal(-status, signal.SIG_DFL)
            os.kill(os.getpid(), -status)

    def _watch(self, pid: int) -> None:
        try:
            # No deadline: the thread ends with the process.
            end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:  # the runner has reaped it, or it is not a direct child
            return
        if end is None or end.si_status == signal.SIGTERM:  # ended because of another child
            return
        if end.si_status:
            sign = 1 if end.si_code == os.CLD_EXITED else -1
            self._statuses.append(sign * end.si_status)


def offer_sockets(
    text: str, sock: socket.socket, ranks: int, on_fetch: Callable[[int], object]
) -> str:
    """Offer a text and the sockets of all ranks, in a thread; return the address.

    ``sock``, to the frontend, is for rank 0. ``on_fetch`` is called with the process id of each
    rank.
    """
    if ranks > _MAX_SOCKETS:
        raise ValueError(f"{ranks} processes, at most {_MAX_SOCKETS} can work together")
    address = uuid.uuid4().hex
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(_ABSTRACT + address)
    listener.listen(ranks)
    pairs = [socket.socketpair() for _ in range(ranks - 1)]
    offers = {0: [sock, *(ours for ours, _ in pairs)]}
    offers.update((rank, [theirs]) for rank, (_, theirs) in enumerate(pairs, 1))
    arguments = listener, text.encode(), offers, on_fetch
    threading.Thread(target=_hand_out, args=arguments, daemon=True).start()
    return address


def fetch_sockets(address: str, rank: int) -> tuple[str, Sequence[socket.socket]]:
    """Fetch the text for all ranks and the socket of one; raises OSError.

    Rank 0 also gets those to the others, in order.
    """
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(_ABSTRACT + address)
        sock.sendall(str(rank).encode())
        data, descriptors, _, _ = socket.recv_fds(sock, _MAX_TEXT_BYTES, _MAX_SOCKETS)
    if not descriptors:
        raise OSError(f"the socket of rank {rank} does not exist or has been fetched")
    for each in descriptors:
        os.set_inheritable(each, False)
    return data.decode(), [socket.socket(fileno=each) for each in descriptors]


def _hand_out(
    listener: socket.socket,
    data: bytes,
    offers: dict[int, list[socket.socket]],
    on_fetch: Callable[[int], object],
) -> None:
    # No deadline: the frontend's startup timeout ends this process.
    with listener:
        while offers:
            client, _ = listener.accept()
            # If it fails, the client has ended, which the runner reports.
            with client, contextlib.suppress(OSError, ValueError):
                pid, uid, _ = _CREDENTIALS.unpack(
                    client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
                )
                if uid != os.geteuid():
                    continue
                client.settimeout(_HELLO_SECONDS)
                if sockets := offers.pop(int(client.recv(16)), None):
                    on_fetch(pid)
                    socket.send_fds(client, [data], [each.fileno() for each in sockets])
                    for each in sockets:
                        each.close()
