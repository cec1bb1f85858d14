"""Joins the pieces of a streamed answer."""

import asyncio
import math
from dataclasses import replace

from marserve.backend.protocol import STREAM_NEXT, Prediction
from marserve.frontend.batching.jobs import Stream, StreamBroken
from marserve.frontend.errors import RequestExpired, ServeError
from marserve.frontend.security.usage import RequestMemory


async def whole_answer(
    stream: Stream, deadline: float, max_bytes: int, memory: RequestMemory
) -> Prediction:
    """Return a streamed answer as a whole, counted in ``memory``, and close the stream.

    The last piece must arrive by the ``deadline``, monotonic seconds.

    Raises:
        TooMuchInFlight: Its memory exceeds a limit.
        RequestExpired: It was not complete in time.
        ServeError: It is too long, or was broken off.
    """
    body = bytearray()
    try:
        async with asyncio.timeout_at(None if deadline == math.inf else deadline):
            async for piece in stream.pieces():
                memory.hold(len(piece))
                body += piece
                if len(body) > max_bytes:
                    break
    except BaseException as error:
        memory.release(len(body))
        if isinstance(error, TimeoutError):
            raise RequestExpired("The answer was not complete in time.") from error
        if isinstance(error, StreamBroken):
            raise ServeError(f"The answer was broken off: {error}") from error
        raise
    finally:
        stream.close()
    if len(body) > max_bytes:
        memory.release(len(body))
        raise ServeError(f"The pieces of an answer are longer than {max_bytes} bytes.")
    first = stream.first
    headers = {name: text for name, text in first.headers.items() if name.lower() != STREAM_NEXT}
    return replace(first, body=body, headers=headers)
