"""Requests that are answered by a coroutine, in a task of their own."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from marserve.backend.protocol import Prediction
from marserve.frontend.batching.jobs import Answer, OnAnswer, Stream
from marserve.frontend.errors import ServeError, unexpected

logger = logging.getLogger(__name__)


class AnswerTask:
    """The `Ticket` of a request that ``find`` answers, or raises the ServeError that is the answer.

    ``on_answer`` is called once, after the constructor has returned; not after `cancel`. ``what``
    names the request in the log after an unexpected error.
    """

    dispatched = None  # the request may be several

    def __init__(
        self, find: Callable[[], Awaitable[Prediction | Stream]], on_answer: OnAnswer, what: str
    ) -> None:
        self._task = asyncio.get_running_loop().create_task(_answer(find, on_answer, what))

    def cancel(self) -> None:
        """Stop, and call nobody."""
        self._task.cancel()


async def _answer(
    find: Callable[[], Awaitable[Prediction | Stream]], on_answer: OnAnswer, what: str
) -> None:
    answer: Answer
    try:
        answer = await find()
    except ServeError as error:
        answer = error
    except Exception as error:  # the last resort: the client must get an answer
        logger.exception("%s cannot be answered.", what)
        answer = unexpected(error)
    try:
        on_answer(answer)
    finally:
        del answer  # an error, its traceback and this frame are a cycle, which keeps the body
