"""Stand-ins that tests share; reached through the fixtures of ``conftest.py``.

* `VirtualLoop`: an event loop that never sleeps. When nothing is ready, its clock jumps to the next
  timer; when there is no timer either, the test would hang, and fails instead.
* `exchange`: a real listener with some routes, asked over a real socket by the bytes of a request.
* `FakeLauncher` and `FakeWorker`: what the supervisor sees of processes. The worker speaks the real
  protocol over a real socket pair, from a task instead of a process.
"""

import asyncio
import contextlib
import json
import selectors
import socket
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from fed_decoder import Decoder
from steps import page_of

from marserve.backend.framing import encode
from marserve.backend.protocol import (
    CallReply,
    CancelPredict,
    Input,
    Load,
    Loaded,
    LoadFailure,
    LoadStarted,
    Part,
    Piece,
    PiecesRead,
    Predict,
    Prediction,
    Reply,
)
from marserve.frontend.batching.jobs import Answer, Job
from marserve.frontend.errors import ServeError
from marserve.frontend.http.http_server import HttpServer
from marserve.frontend.http.router import Route, Router
from marserve.frontend.security.guard import Guard
from marserve.frontend.security.tokens import TokenStore
from marserve.frontend.security.usage import RequestMemory
from marserve.frontend.serving.predict_request import PredictRequest
from marserve.frontend.telemetry.access_log import AccessLog
from marserve.frontend.telemetry.metrics import Metrics
from marserve.frontend.workers.failures import Diagnostics

# Only threads can still make something happen in a loop without timers; they get this long.
_THREAD_SECONDS = 5.0


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self) -> None:
        super().__init__()
        self.jump: Callable[[float], None] = lambda _seconds: None

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is not None:
            self.jump(timeout)
            return []
        ready = super().select(_THREAD_SECONDS)
        if not ready:
            raise AssertionError("everybody waits, and nothing will ever happen")
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only while everybody waits."""

    def __init__(self) -> None:
        self.now = 100.0  # code that reads the real clock must not find an earlier moment
        selector = _JumpingSelector()
        super().__init__(selector)
        selector.jump = self._jump
        self.set_exception_handler(self._note_failure)
        self.failures: list[Mapping[str, Any]] = []

    def time(self) -> float:
        return self.now

    def _jump(self, seconds: float) -> None:
        self.now += seconds

    def _note_failure(self, _loop: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
        self.failures.append(context)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run to the end; no task and no unseen exception may be left behind."""
        try:
            result = self.run_until_complete(work)
        finally:
            left = asyncio.all_tasks(self)
            for task in left:
                task.cancel()
            self.run_until_complete(_ended(left))
        assert not left, f"tasks left behind: {left}"
        assert not self.failures, self.failures
        return result


async def _ended(tasks: Iterable[asyncio.Task[Any]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)
    await drain_loop()


async def drain_loop() -> None:
    """Let everything happen that needs no time to pass."""
    for _ in range(20):
        await asyncio.sleep(0)


def make_input(
    body: bytes = b"x", content_type: str = "", id_: str = "id", **headers: str
) -> Input:
    """An input with one part named ``body``."""
    return Input(id_, headers, [Part("body", content_type, body)])


def make_request(input_: Input, arrived: float | None = None, **members: Any) -> PredictRequest:
    """A request that names no version and, without ``arrived``, arrives now."""
    moment = time.monotonic() if arrived is None else arrived
    return PredictRequest(input_, RequestMemory(), moment, **{"by_version": False, **members})


class AwaitedJob(Job):
    """A job whose answer goes to a future."""

    def __init__(self, input_: Input, arrived: float, future: Any, *group: Any, **options: Any):
        super().__init__(input_, arrived, partial(_answer, future), *group, **options)
        self.future = future
        future.add_done_callback(lambda done: done.cancelled() and self.cancel())

    def cancel(self) -> None:
        super().cancel()
        self.future.cancel()


def _answer(future: Any, answer: Answer) -> None:
    if future.done():
        assert future.cancelled()
    elif isinstance(answer, ServeError):
        future.set_exception(answer)
    else:
        future.set_result(answer)


def echo(predict: Predict) -> Reply:
    """Answer each input with the body of its first part."""
    return Reply(predictions=[Prediction(_body_of(each)) for each in predict.inputs])


def _body_of(input_: Input) -> bytes:
    return bytes(input_.parts[0].body) if input_.parts else b""


@dataclass
class Life:
    """How one life of a fake worker goes.

    Attributes:
        start_error: Raised instead of starting.
        start_seconds: Until the process is there.
        load: What answers the load: a reply, raw bytes, "die" (EOF), "hang", or "stuck" for a
            process that does not begin to load.
        predict: The same for each batch in turn, or several replies, or a function of the batch;
            the last one stays.
        seconds: How long a batch takes.
        end: How its process ends by itself, a sentence.
        diagnostics: What it leaves behind.
        stop_seconds: How long it takes to end when it is stopped.
        runs_out_of_memory: Whether the kernel ends it.
    """

    start_error: Exception | None = None
    start_seconds: float = 0.0
    load: Loaded | LoadFailure | bytes | str = field(default_factory=Loaded)
    predict: Sequence[Callable[[Predict], Any] | Sequence[Reply | Piece] | Reply | bytes | str] = (
        echo,
    )
    seconds: float = 0.0
    end: str = "Its process was killed by SIGSEGV."
    diagnostics: Diagnostics = field(default_factory=Diagnostics)
    stop_seconds: float = 0.0
    runs_out_of_memory: bool = False


class FakeWorker:
    """A worker "process": the interface of `LocalProcess`, the wire, and a life to live."""

    def __init__(self, pid: int, life: Life) -> None:
        self.pid = pid
        self.sock, self._theirs = socket.socketpair()
        self.life = life
        self.loaded: list[Load] = []
        self.batches: list[list[bytes]] = []
        self.graces: list[float] = []
        self.read: list[int] = []  # bytes of pieces, as reported
        self.ran_out_of_memory = life.runs_out_of_memory
        self.diagnostics = life.diagnostics
        self.stacks_written = 0
        self._answers: Iterator[Any] = iter(life.predict)
        self._answer: Any = echo
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._live())
        self._task.add_done_callback(lambda _: self.vanish())

    async def _live(self) -> None:
        self._theirs.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=self._theirs)
        decoder = Decoder(1 << 30)
        try:
            while data := await reader.read(65536):
                for message in decoder.feed(data):
                    await self._obey(message, writer)
        except EOFError:
            pass
        except ConnectionError:
            pass
        finally:
            writer.transport.abort()

    async def _obey(self, message: Any, writer: asyncio.StreamWriter) -> None:
        if isinstance(message, Load):
            self.loaded.append(message)
            answer: Any = self.life.load
            if answer == "stuck":
                return
            writer.write(b"".join(encode(LoadStarted())))
        elif isinstance(message, CallReply | CancelPredict):
            return
        elif isinstance(message, PiecesRead):
            self.read.append(message.count)
            return
        else:
            self.batches.append([_body_of(each) for each in message.inputs])
            await asyncio.sleep(self.life.seconds)
            self._answer = next(self._answers, self._answer)
            answer = self._answer(message) if callable(self._answer) else self._answer
            if isinstance(answer, Reply):
                answer = [answer]
            if isinstance(answer, list):
                answer = b"".join(
                    b"".join(encode(replace(reply, number=message.number))) for reply in answer
                )
        if answer == "die":
            raise EOFError
        if answer != "hang":
            writer.write(answer if isinstance(answer, bytes) else b"".join(encode(answer)))

    def crash(self) -> None:
        """End at once, as by SIGKILL from outside."""
        self._task.cancel()

    def vanish(self) -> None:
        """End, as a process does whose children still hold the wire open."""
        if not self._ended.done():
            self._ended.set_result(None)

    def on_exit(self, call: Callable[[], object]) -> None:
        self._ended.add_done_callback(lambda _: call())

    @property
    def has_exited(self) -> bool:
        return self._task.done()

    async def exit_within(self, seconds: float) -> str:
        await asyncio.wait({self._ended}, timeout=seconds)
        return self.life.end if self._ended.done() else ""

    async def write_stacks(self) -> None:
        self.stacks_written += 1

    async def stop(self, grace: float, close: Callable[[], object] = lambda: None) -> int:
        self.graces.append(grace)
        close()
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self.sock.close()
        await asyncio.sleep(self.life.stop_seconds)
        return 0


class FakeLauncher:
    """Starts fake workers, one life after the other; the last kind of life is repeated."""

    def __init__(self, *lives: Life) -> None:
        self.lives = list(lives) or [Life()]
        self.workers: list[FakeWorker] = []
        self.starts: list[float] = []

    async def start(self, _spec: Any) -> FakeWorker:
        loop = asyncio.get_running_loop()
        self.starts.append(loop.time())
        life = self.lives[min(len(self.starts), len(self.lives)) - 1]
        await asyncio.sleep(life.start_seconds)
        if life.start_error is not None:
            raise life.start_error
        worker = FakeWorker(4000 + len(self.starts), life)
        self.workers.append(worker)
        return worker


@dataclass
class Answered:
    """An HTTP response as it came over the wire; header names in lower case."""

    raw: bytes
    status_line: str
    headers: dict[str, str]
    body: bytes

    @property
    def status(self) -> int:
        return int(self.status_line.split()[1])

    @property
    def document(self) -> Any:
        return json.loads(self.body)


def parse_answer(raw: bytes) -> Answered:
    """Take one response apart; what follows the head is its body."""
    head, _, body = raw.partition(b"\r\n\r\n")
    status_line, *lines = head.decode("latin-1").split("\r\n")
    pairs = (line.partition(": ") for line in lines)
    return Answered(raw, status_line, {name.lower(): value for name, _, value in pairs}, body)


def request(
    target: str = "/", method: str = "GET", body: bytes = b"", *headers: str, framed: bool = True
) -> bytes:
    """The bytes of a request after which the connection is closed."""
    lines = [f"{method} {target} HTTP/1.1", "Host: localhost", "Connection: close", *headers]
    if framed and (body or method in ("POST", "PUT")):
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode("utf-8", "surrogateescape") + body


def sample_value(metrics: Metrics, name: str, labels: Mapping[str, str]) -> float | None:
    """What the page of metrics says of a sample; None where it is not there."""
    pairs = "".join(f'{key}="{value}",' for key, value in labels.items())
    start = f"{name}{{{pairs}}} "
    found = [line for line in page_of(metrics.registry).splitlines() if line.startswith(start)]
    return float(found[0][len(start) :]) if found else None


def exchange(
    routes: Mapping[str, Route],
    *sent: bytes,
    metrics: Metrics | None = None,
    half_close: bool = False,
    lingers: bool = False,
    common_headers: str = "",
    tokens: TokenStore | None = None,
    local_management: bool = False,
    fast_path: bool = True,
) -> Answered:
    """Open a listener with these routes, send bytes, and read until it closes the connection.

    Where it ``lingers``, to let a client finish sending, only the head of the answer is read.
    """

    async def talk() -> bytes:
        loop = asyncio.get_running_loop()
        log = AccessLog(loop, metrics or Metrics("host"))
        guard = Guard(tokens, local=("management",) if local_management else ())
        router = Router(routes, guard=guard, access_log=log, common_headers=common_headers)
        server = HttpServer(router, fast_path=fast_path)
        listener = await loop.create_server(server, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*listener.sockets[0].getsockname())
        try:
            for piece in sent:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            if half_close:
                writer.write_eof()
            answer = reader.readuntil(b"\r\n\r\n") if lingers else reader.read()
            return await asyncio.wait_for(answer, 5.0)
        finally:
            writer.transport.abort()
            listener.close()
            await server.close(0.5)
            log.flush()
            await drain_loop()

    return parse_answer(asyncio.run(talk()))
