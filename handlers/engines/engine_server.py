"""An inference engine's own HTTP server: a child process of the worker, whose answers are relayed.

Engines keep their HTTP interface and move their classes. The child is in the worker's process
group, so that it is killed with the worker; when it ends by itself, the worker ends too and is
replaced.
"""

import asyncio
import atexit
import contextlib
import logging
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import aiohttp

from marserve.backend.context import Context
from marserve.backend.errors import OptionRefused
from marserve.backend.protocol import Buffer

logger = logging.getLogger(__name__)

# The variable with the path of the server's directory (`frontend.lifecycle.workdir`).
_WORKDIR = "MARSERVE_WORKDIR"
# Between two requests for its health, in seconds.
_POLL_SECONDS = 0.1
# The time for it to end after SIGTERM; the frontend kills the worker's group after 2 s.
_STOP_SECONDS = 1.5
# The time for the end of standard error, and for the end behind a broken connection to be known.
_LAST_SECONDS = 1.0
_USAGE_ERROR = 2  # the exit status of argparse for an option that does not exist
_LAST_BYTES = 2000
_SECRET = re.compile(r"(--(?:api-key|hf-token)[= ])\S+")
_PIECE_BYTES = 4096
# The longest piece of a stream. With 64 KiB, a long stream costs the frontend a third more.
_STREAM_BYTES = 1 << 18
# The last event of a stream. It ends the answer, instead of an empty piece.
_DONE = b"data: [DONE]"
# Headers of a client that the engine receives, in lower case.
_HEADERS = ("traceparent", "tracestate")


class EngineServer:
    """The process of an engine's server.

    Args:
        command: The program and its arguments. ``{socket}`` in them is the path of a unix socket to
            listen on, ``{port}`` a free port of 127.0.0.1; one of them must occur.
        health: The path that answers 200 when the engine can serve.
    """

    def __init__(self, command: Sequence[str], health: str = "/health") -> None:
        # In the server's directory, which is removed even after a SIGKILL of this process.
        place = os.environ.get(_WORKDIR)
        self._directory = tempfile.TemporaryDirectory(prefix="engine-", dir=place)
        path = str(Path(self._directory.name, "socket"))
        port = str(_free_port())
        self._command = [word.replace("{socket}", path).replace("{port}", port) for word in command]
        self._connector: Callable[..., aiohttp.BaseConnector]
        if any("{socket}" in word for word in command):
            self._address, self._connector = "http://engine", partial(aiohttp.UnixConnector, path)
        elif any("{port}" in word for word in command):
            self._address, self._connector = f"http://127.0.0.1:{port}", aiohttp.TCPConnector
        else:
            raise OptionRefused("handler.command contains neither {socket} nor {port}")
        self._health = f"{self._address}/{health.removeprefix('/')}"
        self._last = b""  # of its standard error
        self.program = Path(self._command[0]).name

    def start(self, environment: Mapping[str, str]) -> None:
        """Start the process, which ends with this one; OSError if the program cannot be started."""
        command = _SECRET.sub(r"\1…", " ".join(self._command))
        logger.info("Starting the engine: %s", command)
        self._process = subprocess.Popen(  # noqa: S603 - the model's author chose it
            self._command, env=environment, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        atexit.register(self._stop)
        self._copying = threading.Thread(target=self._copy_errors, daemon=True)
        self._copying.start()

    async def wait_until_ready(self) -> None:
        """Wait until it can serve; the deadline is ``startupTimeout``.

        When it ends later, this process ends.

        Raises:
            OptionRefused: It has ended, because its command line has an option that it lacks.
            RuntimeError: It has ended.
        """
        loop = asyncio.get_running_loop()
        self._session = aiohttp.ClientSession(
            # Engines keep idle connections for 5 s; a request on one that ends would fail.
            connector=self._connector(limit=0, keepalive_timeout=2),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(None),  # the frontend has deadlines
            auto_decompress=False,
        )
        ended: asyncio.Future[int] = loop.create_future()
        self._ended = ended

        def wait() -> None:
            status = self._process.wait()
            self._copying.join(_LAST_SECONDS)  # its children may still have standard error
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(ended.set_result, status)

        threading.Thread(target=wait, daemon=True).start()
        while not await self._is_healthy():
            await asyncio.wait({ended}, timeout=_POLL_SECONDS)
            if ended.done():
                await self._session.close()
                raise self._failure(ended.result())
        ended.add_done_callback(self._end_worker)

    async def relay(self, method: str, path: str, body: Buffer, context: Context) -> bytes:
        """Send the request of a context, and return the body of the answer.

        The context gets status and media type. Pieces of a ``text/event-stream`` are sent as they
        arrive, except the last; while the client has many unread, the engine is not read. A longer
        body than the context allows is not read to its end, and too long to be sent, too.
        """
        headers = {"content-type": "application/json", "accept-encoding": "identity"}
        headers["x-request-id"] = (context.get_request_id(0) or "").strip()
        headers |= {
            name: value
            for name, value in context.get_all_request_header(0).items()
            # The entry of a form's part is a dict.
            if name.lower() in _HEADERS and isinstance(value, str) and value.isascii()
        }
        try:
            return await self._relay(method, path, body, headers, context)
        except aiohttp.ClientError:
            # If the engine has ended, this process ends first, and the request is repeated.
            await asyncio.wait({self._ended}, timeout=_LAST_SECONDS)
            raise

    async def _relay(
        self, method: str, path: str, body: Buffer, headers: Mapping[str, str], context: Context
    ) -> bytes:
        async with self._session.request(
            method,
            f"{self._address}/{path}",
            data=body or None,
            headers=headers,
            allow_redirects=False,
        ) as answer:
            kind = answer.headers.get("content-type", "")
            context.set_response_status(answer.status, "", 0)
            context.set_response_content_type(0, kind)
            longest = context.max_response_bytes
            if not kind.startswith("text/event-stream"):
                body = bytearray()
                while len(body) <= longest and (piece := await answer.content.readany()):
                    body += piece
                return bytes(body)
            last = b""
            async for piece in answer.content.iter_chunked(min(_STREAM_BYTES, longest)):
                pieces = [last, piece] if last else [piece]
                last = pieces.pop() if _DONE in piece else b""
                for each in pieces:
                    context.send_intermediate([each], context.request_ids, "Result", 200)
                    await context.drain()
            return last

    async def _is_healthy(self) -> bool:
        try:
            async with self._session.get(self._health) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, OSError):
            return False

    def _copy_errors(self) -> None:
        """Copy its standard error to the model log, and keep the end."""
        assert self._process.stderr is not None
        while piece := os.read(self._process.stderr.fileno(), _PIECE_BYTES):
            self._last = (self._last + piece)[-_LAST_BYTES:]
            sys.stderr.write(piece.decode(errors="replace"))

    def _failure(self, status: int) -> Exception:
        lines = self._last.decode(errors="replace").strip().splitlines() or [""]
        sentence = f"{self.program} has ended with status {status}: {lines[-1]}"
        return OptionRefused(sentence) if status == _USAGE_ERROR else RuntimeError(sentence)

    def _end_worker(self, ended: "asyncio.Future[int]") -> None:
        raise SystemExit(f"{self.program} has ended with status {ended.result()}.")

    def _stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._directory.cleanup()


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port
