"""The session of the exporter of spans, which limits the answers of the receiver.

The exporter alone would read a body of any length, wait for a receiver that sends a byte from time
to time, and count a redirect as a success.
"""

import io
import os
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from urllib3.exceptions import HTTPError

from marserve.frontend.logs.formats import excerpt
from marserve.frontend.socket_deadline import socket_deadline

# Of the body of an answer. The exporter does not use it, but a connection whose answer is read is
# used again.
_MAX_BODY_BYTES, _BODY_SECONDS = 4096, 1.0
# Of an answer's head, if the timeout of the exporter is none, is not a number, or is longer.
_SECONDS, _MAX_SECONDS = 10.0, 3600.0
# Variables of a session of the operator's own.
_OWN_SESSION = (
    "OTEL_PYTHON_EXPORTER_OTLP_HTTP_CREDENTIAL_PROVIDER",
    "OTEL_PYTHON_EXPORTER_OTLP_HTTP_TRACES_CREDENTIAL_PROVIDER",
)


def receiver_session() -> requests.Session | None:
    """Return the session for the exporter; None if a variable names another one."""
    if any(os.environ.get(name) for name in _OWN_SESSION):
        return None
    session = requests.Session()
    adapter = _LimitedAnswers()
    session.mount("http://", adapter)
    session.mount("https://", adapter)
    return session


class _LimitedAnswers(HTTPAdapter):
    """Reads an answer in limited time and memory; raises RequestException for a redirect."""

    _pool: Any = None
    # Of urllib3, the last one, since one thread sends; and its socket once it is connected.
    _connection: Any = None
    _connected: Any = None

    def send(  # type: ignore[override]  # the parent names the parameters of `more`
        self,
        request: requests.PreparedRequest,
        stream: bool = False,
        timeout: Any = None,
        **more: Any,
    ) -> requests.Response:
        del stream
        is_usable = isinstance(timeout, int | float) and timeout < _MAX_SECONDS
        seconds = timeout if is_usable else _SECONDS
        if seconds <= 0:
            raise requests.Timeout("no time is left", request=request)
        answer: requests.Response | None = None
        try:
            with socket_deadline(seconds, self._socket):
                answer = super().send(request, stream=True, timeout=seconds, **more)
        except TimeoutError as error:
            if answer is not None:  # a head that was cut off
                answer.close()
            raise requests.Timeout(str(error), request=request) from error
        if answer.status_code < 200 or 300 <= answer.status_code < 400:
            answer.close()
            status = excerpt(f"{answer.status_code} {answer.reason}")
            raise requests.RequestException(
                f"the receiver answered {status}, which is no success", request=request
            )
        found = requests.Response()
        found.request, found.url, found.headers = request, answer.url, answer.headers
        found.status_code, found.reason = answer.status_code, excerpt(answer.reason)
        found.raw = io.BytesIO(self._body_of(answer))
        return found

    def get_connection_with_tls_context(self, *arguments: Any, **more: Any) -> Any:
        """Return the pool of a request, whose connections become known; called by `send`."""
        return self._watched(super().get_connection_with_tls_context(*arguments, **more))

    def get_connection(self, *arguments: Any, **more: Any) -> Any:
        """As the other; called by requests before 2.32."""
        return self._watched(super().get_connection(*arguments, **more))

    def _watched(self, pool: Any) -> Any:
        if pool is not self._pool:
            self._pool, adapter = pool, self

            class Connection(pool.ConnectionCls):  # type: ignore[misc]  # not known before
                def connect(self) -> None:
                    adapter._connection = self
                    super().connect()
                    adapter._connected = self.sock

            pool.ConnectionCls = Connection
        return pool

    def _socket(self) -> Any:
        """Return the socket of the last connection, also while the TLS handshake lasts.

        A connection that the receiver is going to close has none while its answer is read.
        """
        return getattr(self._connection, "sock", None) or self._connected

    def _body_of(self, answer: requests.Response) -> bytes:
        """Return the beginning of a body; close the connection if there is more."""
        body = b""
        try:
            with socket_deadline(_BODY_SECONDS, self._socket):
                body = answer.raw.read(_MAX_BODY_BYTES, decode_content=False)
                is_whole = not answer.raw.read(1, decode_content=False)
        except (OSError, HTTPError):
            is_whole = False
        if not is_whole:
            answer.close()
        return body
