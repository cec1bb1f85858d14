"""The express lane: a plain prediction from socket to socket without a task of its own.

aiohttp makes a task, a request, a response and several turns of the loop of whatever it has parsed.
For a model that answers at once that is most of what a prediction costs: 168 thousand instructions
for a bare echo, of which the parser takes 48. A request that is whole when it comes needs none of
it: it is queued in the turn of the loop in which it was read, and answered in the turn in which the
worker's reply is. Everything else (bodies in pieces, forms, chunks, whatever a route does not know
to be plain) goes aiohttp's way, and so does the next request of a client that reads too slowly.

Both ways give the same answers: they share the parser, the words and the books.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from aiohttp import StreamReader, web
from aiohttp.http import HttpVersion11, RawRequestMessage, StreamWriter

from marserve.backend.protocol import Prediction
from marserve.frontend.batching.jobs import Answer as Outcome
from marserve.frontend.batching.jobs import OnAnswer
from marserve.frontend.batching.streams import Stream
from marserve.frontend.errors import ServeError
from marserve.frontend.http.ledger import Ledger
from marserve.frontend.http.request_ids import new_request_id
from marserve.frontend.http.responses import (
    Answer,
    StreamAnswer,
    check_prediction,
    framing,
    prediction_answer,
    response_head,
    write_response,
)

logger = logging.getLogger(__name__)


class Ticket(Protocol):
    """A request that was queued; see `models.admission.Ticket`."""

    def cancel(self) -> None:
        """Nobody waits for its answer any more."""


class Lane(Protocol):
    """The connection of a client, as an errand sees it."""

    peer: str
    transport: asyncio.Transport | None

    def make_request(
        self, message: RawRequestMessage, body: StreamReader, writer: StreamWriter
    ) -> web.BaseRequest:
        """The request as aiohttp makes it, for answers that need one."""

    def errand_ended(self, *, keep_alive: bool) -> None:
        """The answer is written, or will never be."""


@dataclass(slots=True)
class Whole:
    """A request that is whole.

    Attributes:
        message: Its head.
        body: Its body; all of it has come.
        segments: Its decoded path, split.
        id: The id the server gave it.
        arrived: Moment of arrival, on the monotonic clock.
    """

    message: RawRequestMessage
    body: StreamReader
    segments: Sequence[str]
    id: str
    arrived: float


#: Queues a request and calls back with the answer; None if it is not plain, and then it was not
#: touched. May raise `ServeError` instead, the answer.
Express = Callable[[Whole, OnAnswer], Ticket | None]
Refuse = Callable[[ServeError], Answer]


def is_whole(message: RawRequestMessage, body: StreamReader) -> bool:
    """Whether a request has come with all of its body, and nothing is special about it."""
    return (
        body.is_eof()
        and message.version == HttpVersion11
        and not (message.should_close or message.chunked or message.upgrade)
    )


class Errand:
    """A request on the express lane.

    Args:
        request: What was asked.
        refuse: Makes the answer of what goes wrong.
        lane: Where the answer is written.
        ledger: Where it is noted.
    """

    __slots__ = (
        "_lane",
        "_ledger",
        "_refuse_with",
        "_request",
        "_stream",
        "_streaming",
        "_ticket",
    )

    def __init__(self, request: Whole, refuse: Refuse, lane: Lane, ledger: Ledger) -> None:
        self._request = request
        self._refuse_with = refuse
        self._lane = lane
        self._ledger = ledger
        self._ticket: Ticket | None = None
        self._stream: Stream | None = None
        self._streaming: asyncio.Task[None] | None = None

    def begin(self, express: Express) -> bool:
        """Queue the request; False if it is not plain."""
        try:
            self._ticket = express(self._request, self._conclude)
        except ServeError as error:
            self._refuse(error.with_traceback(None))  # whose frames know us: a circle
            return True
        except Exception:  # the last resort
            logger.exception("Cannot answer %s", self._request.message.path)
            self._refuse(ServeError("Internal server error."))
            return True
        return self._ticket is not None

    def abandon(self) -> None:
        """The client has left."""
        if self._streaming is not None:
            self._streaming.cancel()
            if self._stream is not None:
                self._stream.close()  # by itself too: the task may not have begun
        elif self._ticket is not None:
            self._ticket.cancel()

    def _conclude(self, outcome: Outcome) -> None:
        """Write the answer. Whatever goes wrong here must not reach its batch-mates."""
        try:
            if isinstance(outcome, ServeError):
                self._refuse(outcome)
            elif isinstance(outcome, Stream):
                self._stream = outcome
                self._streaming = asyncio.ensure_future(self._write_stream(outcome))
            else:
                self._answer(outcome)
        except Exception:
            logger.exception("Cannot answer %s", self._request.message.path)
            self._break_off()

    def _answer(self, prediction: Prediction) -> None:
        try:
            check_prediction(prediction)
        except ServeError as error:
            self._refuse(error)
            return
        status = prediction.status
        self._note(status)
        lane, keep_alive = self._lane, status < 400
        if lane.transport is not None:
            head = response_head(
                status,
                prediction.reason,
                self._request.id,
                self._ledger.prelude,
                prediction.headers,
                framing(status, len(prediction.body)),
                keep_alive=keep_alive,
            )
            write_response(lane.transport, status, head, prediction.body)
        lane.errand_ended(keep_alive=keep_alive)

    def _refuse(self, error: ServeError) -> None:
        answer = self._refuse_with(error)
        answer.prelude = self._ledger.prelude
        answer.request_id = self._request.id
        self._note(answer.status)
        keep_alive = answer.status < 400
        if self._lane.transport is not None:
            answer.write_to(self._lane.transport, keep_alive=keep_alive)
        self._lane.errand_ended(keep_alive=keep_alive)

    async def _write_stream(self, stream: Stream) -> None:
        """Write an answer in pieces; for that aiohttp's request is needed after all."""
        loop = asyncio.get_running_loop()
        keep_alive = False
        try:
            request = self._request
            answer = prediction_answer(stream)
            assert isinstance(answer, StreamAnswer)
            answer.prelude, answer.request_id = self._ledger.prelude, self._request.id
            self._note(answer.status)
            writer = StreamWriter(self._lane, loop)  # type: ignore[arg-type]  # it is a Connection
            await answer.prepare(self._lane.make_request(request.message, request.body, writer))
            keep_alive = bool(answer.keep_alive)
        except ServeError as error:
            self._refuse(error)
            return
        except Exception:
            logger.exception("Cannot answer %s", self._request.message.path)
            self._break_off()
            return
        finally:
            stream.close()
        self._lane.errand_ended(keep_alive=keep_alive)

    def _break_off(self) -> None:
        if self._lane.transport is not None:
            self._lane.transport.abort()

    def _note(self, status: int) -> None:
        message, arrived = self._request.message, self._request.arrived
        seconds = time.monotonic() - arrived
        self._ledger.note(self._lane.peer, message.method, message.path, status, seconds)


def whole_request(message: RawRequestMessage, body: StreamReader, segments: Sequence[str]) -> Whole:
    """A request as it arrives now."""
    return Whole(message, body, segments, new_request_id(), time.monotonic())
