"""The worker process: read a message, do it, answer; end when the frontend closes the wire.

One process serves one model with one batch at a time, blocking, single-threaded as far as this file
goes. The frontend learns of its end by EOF on the wire, whatever the reason; exit status 0 says
"the frontend left", 1 "the model did not load" or "the wire broke". Everything else is the
handler's doing (``sys.exit``, a signal, a segfault).

`WorkerSetup` crosses from the frontend to its own child by multiprocessing; after that only frames
do.
"""

import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TextIO

from marserve.backend.loader import load_service
from marserve.backend.protocol import Decoder, Load, Message, Predict, ProtocolError, Reply, encode
from marserve.backend.service import Service

logger = logging.getLogger(__name__)

# Requests were bounded at the door; this only keeps a broken peer from asking for all memory.
_MAX_REQUEST_FRAME_BYTES = (1 << 32) - 1


@dataclass(frozen=True)
class WorkerSetup:
    """What a new process needs before it can speak.

    Attributes:
        wire: Its end of the socket pair.
        stdout: Write end of the pipe that becomes file descriptor 1.
        stderr: Write end of the pipe that becomes file descriptor 2.
        environment: The whole environment of the process.
        python_path: Put in front of ``sys.path``, in this order.
        model_dir: Working directory.
        threads: Intra-op threads for torch and OpenMP; 0 leaves them as they are.
    """

    wire: socket.socket
    stdout: Connection
    stderr: Connection
    environment: Mapping[str, str]
    python_path: tuple[str, ...]
    model_dir: str
    threads: int


def main(setup: WorkerSetup) -> None:
    """Run the worker until its wire closes; never returns."""
    _become_worker(setup)
    print(f"[PID]{os.getpid()}")  # noqa: T201 - lines that operators of TorchServe grep
    print("Torch worker started.")  # noqa: T201
    print(f"Python runtime: {sys.version.split()[0]}")  # noqa: T201
    sys.exit(_serve(Wire(setup.wire)))


def _become_worker(setup: WorkerSetup) -> None:
    os.setsid()  # a process group of its own: killed with all its children, deaf to Ctrl-C
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for pipe, fd in ((setup.stdout, 1), (setup.stderr, 2)):
        os.dup2(pipe.fileno(), fd)
        pipe.close()
    sys.stdout, sys.stderr = _line_buffered(1), _line_buffered(2)
    os.environ.clear()
    os.environ.update(setup.environment)
    sys.path[:0] = setup.python_path
    os.chdir(setup.model_dir)
    _limit_threads(setup.threads)
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s", force=True)


def _line_buffered(fd: int) -> TextIO:
    """A pipe is block-buffered by default; a log wants its lines when they are written."""
    return open(fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _limit_threads(threads: int) -> None:
    if not threads:
        return
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):  # read when the libraries load
        os.environ.setdefault(name, str(threads))
    torch = sys.modules.get("torch")  # loaded already in a child of the fork server
    if torch is not None:
        torch.set_num_threads(threads)


class Wire:
    """The worker's blocking shell around the protocol."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._sock = sock
        self._decoder = Decoder(_MAX_REQUEST_FRAME_BYTES)
        self._inbox: list[Message] = []

    def receive(self) -> Message | None:
        """Wait for the next message; None when the frontend has left.

        No deadline: an idle worker has nothing better to do, and learns of the frontend's end by
        EOF.

        Raises:
            ProtocolError: What came is no message, or EOF came in the middle of one.
        """
        while not self._inbox:
            count = self._sock.recv_into(self._decoder.buffer)
            if count == 0:
                if self._decoder.is_between_frames:
                    return None
                raise ProtocolError("the frontend left in the middle of a message")
            self._inbox = self._decoder.received(count)
        return self._inbox.pop(0)

    def send(self, message: Message) -> None:
        """Write a whole message."""
        buffers = encode(message)
        if sum(map(len, buffers)) <= 64 * 1024:  # one system call beats one copy
            self._sock.sendall(b"".join(buffers))
            return
        for buffer in buffers:
            self._sock.sendall(buffer)


def _serve(wire: Wire) -> int:
    """Answer messages until the frontend leaves; returns the exit status."""
    service: Service | None = None
    owner = os.getpid()
    try:
        while (message := wire.receive()) is not None:
            if isinstance(message, Load):
                service, reply = _load(message)
                wire.send(reply)
                if service is None:
                    return 1
            elif isinstance(message, Predict) and service is not None:
                reply = service.predict(message.inputs)
                if os.getpid() != owner:
                    os._exit(0)  # a child that the handler forked came back: the wire is not its
                reply.number = message.number
                _send(wire, reply)
            else:
                logger.error("%s is not expected now.", type(message).__name__)
                return 1
    except (ProtocolError, ConnectionError):
        logger.exception("Backend worker process died.")
        return 1
    logger.info("Frontend disconnected.")
    return 0


def _send(wire: Wire, reply: Reply) -> None:
    """Send a reply, or say that it cannot be: foreign objects may still hide in it."""
    try:
        wire.send(reply)
    except (ProtocolError, TypeError, ValueError, AttributeError, RecursionError):
        logger.exception("The reply cannot be sent.")
        wire.send(Reply(503, "Prediction failed", number=reply.number))


def _load(load: Load) -> tuple[Service | None, Reply]:
    logger.info("model_name: %s, batchSize: %d", load.model_name, load.batch_size)
    started = time.perf_counter()
    try:
        service = load_service(load)
    except Exception as error:  # foreign code
        logger.exception("Load model failed: %s", load.model_name)
        return None, Reply(_load_status(error), f"{type(error).__name__}: {error}")
    logger.info("Model %s loaded in %.3f s.", load.model_name, time.perf_counter() - started)
    return service, Reply(message=f"loaded model {load.model_name}")


def _load_status(error: Exception) -> int:
    out_of_memory = isinstance(error, RuntimeError) and "CUDA" in str(error)
    return 507 if out_of_memory or isinstance(error, MemoryError) else 500
