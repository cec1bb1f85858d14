"""A deadline for what a blocking client does with a socket.

The timeout of a socket restarts with each byte, so that a peer which sends a byte from time to time
would hold its client without end.
"""

import http.client
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress


@contextmanager
def socket_deadline(seconds: float, current: Callable[[], socket.socket | None]) -> Iterator[None]:
    """Shut down the socket that ``current`` returns after some seconds.

    Raises:
        TimeoutError: The socket was shut down.
    """
    is_over = threading.Event()

    def end() -> None:
        is_over.set()
        if (opened := current()) is not None:
            with suppress(OSError):
                # SSLSocket.shutdown would discard the SSL object that another thread reads from.
                socket.socket.shutdown(opened, socket.SHUT_RDWR)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    except (OSError, http.client.HTTPException):
        if not is_over.is_set():
            raise
    finally:
        timer.cancel()
    if is_over.is_set():
        raise TimeoutError(f"no whole answer within {seconds:g} s")
