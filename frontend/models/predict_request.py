"""What a transport asks of a model, and how it is answered.

All that a transport (HTTP, gRPC, a workflow's node) has to do:

    request = PredictRequest(input_, arrived, by_version, options)
    ticket = model.submit(request, on_answer)    # or it raises the ServeError that is the answer

    def on_answer(answer: Answer) -> None:       # a Prediction, a ServeError, or a Stream, which is
        ...                                      # to be closed when it is read or nobody reads it

    ticket.cancel()                              # the client has left: nothing is called any more

A coroutine says ``await model.predict(request)`` instead. ``on_answer`` is called once, from the
event loop, never before `submit` has returned. It must not raise: it is called while the other
requests of the batch are answered.

Nothing else is a transport's business: whether there is room, deadlines, what is counted, timed and
given back is settled by `admission` before the answer is passed on.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from marserve.backend.protocol import Input, Prediction
from marserve.frontend.batching.jobs import Priority
from marserve.frontend.errors import ServeError


@dataclass(frozen=True)
class RequestOptions:
    """How soon a client wants its answer.

    Attributes:
        timeout: Seconds from the arrival of the request; infinite for as long as it takes.
        priority: Its class.
    """

    timeout: float = math.inf
    priority: Priority = Priority.NORMAL


NO_OPTIONS = RequestOptions()


@dataclass(slots=True)
class PredictRequest:
    """What a model is asked, whatever the transport.

    Attributes:
        input: What the client sent: parts, and headers as the handler sees them. The header
            ``explain: True`` asks for an explanation; whatever is in ``describe`` is replaced.
        arrived: Moment of arrival, on the monotonic clock.
        by_version: Whether the client named the version.
        options: How soon it wants the answer.
        describe: Whether the handler is to describe its model. Such requests are not counted.
    """

    input: Input
    arrived: float
    by_version: bool
    options: RequestOptions = NO_OPTIONS
    describe: bool = False


#: What becomes of requests that belong together: their predictions in order, up to the first whose
#: status is not 200; or the failure of the first that was not answered.
JointAnswer = list[Prediction] | ServeError
OnJointAnswer = Callable[[JointAnswer], None]


class Ticket(Protocol):
    """A request that was taken in."""

    def cancel(self) -> None:
        """Give up waiting: for the answer, or for the rest of a stream. Safe at any time."""
