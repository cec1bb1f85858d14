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
from marserve.frontend.batching.jobs import Addressee, Answered
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


class Admission(Protocol):
    """A request that was queued; see `models.registry.Admission`."""

    def answered(self, answer: Answered, /) -> None:
        """Its answer has come."""

    def give_up(self) -> None:
        """It has failed, or nobody waits."""


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


#: Queues a request for somebody; None if it is not plain, and then it was not touched. May raise
#: `ServeError` instead, the answer.
Express = Callable[[Whole, Addressee], Admission | None]
Refuse = Callable[[ServeError], Answer]


def is_whole(message: RawRequestMessage, body: StreamReader) -> bool:
    """Whether a request has come with all of its body, and nothing is special about it."""
    return (
        body.is_eof()
        and message.version == HttpVersion11
        and not (message.should_close or message.chunked or message.upgrade)
    )


class Errand:
    """A request on the express lane; takes the place of the future that a task would wait for.

    Args:
        request: What was asked.
        refuse: Makes the answer of what goes wrong.
        lane: Where the answer is written.
        ledger: Where it is noted.
    """

    __slots__ = (
        "_admission",
        "_is_abandoned",
        "_lane",
        "_ledger",
        "_outcome",
        "_refuse_with",
        "_request",
        "_streaming",
    )

    def __init__(self, request: Whole, refuse: Refuse, lane: Lane, ledger: Ledger) -> None:
        self._request = request
        self._refuse_with = refuse
        self._lane = lane
        self._ledger = ledger
        self._admission: Admission | None = None
        self._outcome: Answered | ServeError | None = None
        self._is_abandoned = False
        self._streaming: asyncio.Task[None] | None = None

    def begin(self, express: Express) -> bool:
        """Queue the request; False if it is not plain."""
        try:
            self._admission = express(self._request, self)
        except ServeError as error:
            self._outcome = error.with_traceback(None)  # whose frames know us: a circle
            self._refuse(error)
            return True
        except Exception:  # the last resort
            logger.exception("Cannot answer %s", self._request.message.path)
            self._outcome = failure = ServeError("Internal server error.")
            self._refuse(failure)
            return True
        if self._admission is None:
            return False
        if self._outcome is not None:  # answered before this knew whom to tell
            self._conclude(self._outcome)
        return True

    def abandon(self) -> None:
        """The client has left."""
        if self._streaming is not None:
            self._streaming.cancel()
            if isinstance(self._outcome, Stream):
                self._outcome.close()  # by itself too: the task may not have begun
        elif not self.done():
            self._is_abandoned = True
            self._part().give_up()

    # As a future: see `Addressee`.

    def done(self) -> bool:
        """Whether an answer has come, or nobody waits for it."""
        return self._outcome is not None or self._is_abandoned

    def cancelled(self) -> bool:
        """Whether nobody waits."""
        return self._is_abandoned

    def exception(self) -> BaseException | None:
        """The failure that was the answer, if it was one."""
        return self._outcome if isinstance(self._outcome, ServeError) else None

    def set_result(self, answered: Answered) -> None:
        """Take the answer, and write it."""
        self._outcome = answered
        if self._admission is not None:
            self._conclude(answered)

    def set_exception(self, error: ServeError) -> None:
        """Take a failure, and write it."""
        self._outcome = error
        if self._admission is not None:
            self._conclude(error)

    def _conclude(self, outcome: Answered | ServeError) -> None:
        """Write the answer. Whatever goes wrong here must not reach its batch-mates."""
        admission = self._part()
        try:
            if isinstance(outcome, ServeError):
                admission.give_up()
                self._refuse(outcome)
                return
            admission.answered(outcome)
            if isinstance(outcome, Stream):
                self._streaming = asyncio.ensure_future(self._stream(outcome))
            else:
                self._answer(outcome)
        except Exception:
            logger.exception("Cannot answer %s", self._request.message.path)
            self._break_off()

    def _part(self) -> Admission:
        """The admission, which is forgotten: with the job, which knows us, it would be a circle."""
        admission, self._admission = self._admission, None
        assert admission is not None
        return admission

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

    async def _stream(self, stream: Stream) -> None:
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
