"""The calls that handlers make to other models (`Context.infer`), for one worker process.

A call is made on behalf of a job in the worker. When nobody waits for that job any more (it is
answered, expired, its client has left, its worker is dead), its calls are cancelled. Every call is
answered once, unless its handler has cancelled it or the worker is gone.

Which model is called, and whether that is allowed, is not decided here: see `CallModel`.
"""

from collections.abc import Callable
from functools import partial
from typing import Protocol

from marserve.backend.protocol import Call, CallReply, Prediction
from marserve.frontend.batching.jobs import Job
from marserve.frontend.errors import CallerGone, ServeError, ServerBusy

#: The most calls that a worker may have under way.
MAX_CALLS = 1000


class CallTicket(Protocol):
    """Handle of a call that is under way."""

    def cancel(self) -> None:
        """Stop waiting for the answer. Safe at any time."""


#: The answer to a call; one in pieces is whole.
CallAnswer = Prediction | ServeError

#: Gets the answer, and what is to be called when the worker has read it.
OnCallAnswer = Callable[[CallAnswer, Callable[[], object]], None]

#: Calls a model on behalf of a job; the callback is called once, later. Raises the ServeError that
#: refuses the call.
CallModel = Callable[[Job, Call, OnCallAnswer], CallTicket]


def no_calls(_caller: Job, _call: Call, _on_answer: OnCallAnswer) -> CallTicket:
    """Refuse all calls: there are no models to be called."""
    raise ServeError("Models cannot be called here.")


class WorkerCalls:
    """The calls of one worker process; ``reply`` is `WorkerConnection.reply_to_call`."""

    def __init__(self, call_model: CallModel, reply: Callable[..., None]) -> None:
        self._call_model = call_model
        self._reply = reply
        #: By number of the call: the number of the batch on whose behalf it is, and its ticket.
        self._under_way: dict[int, tuple[int, CallTicket]] = {}
        #: By number of a batch: the numbers of its calls.
        self._numbers: dict[int, set[int]] = {}

    @property
    def are_under_way(self) -> bool:
        """Whether a call waits for its answer."""
        return bool(self._under_way)

    def begin(self, caller: Job | None, call: Call) -> None:
        """Make a call; ``caller`` is None if the job on whose behalf it is made is answered."""
        number, batch = call.number, call.batch
        try:
            if caller is None or not caller.is_open or number in self._under_way:
                raise CallerGone
            if len(self._under_way) >= MAX_CALLS:
                raise ServerBusy(f"The worker has {MAX_CALLS} calls of models under way.")
            ticket = self._call_model(caller, call, partial(self._answered, number))
        except ServeError as error:
            self._reply(_reply_of(number, error))
            return
        self._under_way[number] = batch, ticket
        self._numbers.setdefault(batch, set()).add(number)
        caller.notify_end(partial(self.end, batch))

    def cancel(self, number: int) -> None:
        """End a call whose handler does not wait for it any more."""
        if number in self._under_way:
            self._remove(number).cancel()

    def end(self, batch: int) -> None:
        """End the calls on behalf of a batch for which nobody waits any more."""
        for number in self._numbers.pop(batch, ()):
            _, ticket = self._under_way.pop(number)
            ticket.cancel()
            self._reply(_reply_of(number, CallerGone()))

    def close(self) -> None:
        """End all calls: the worker is gone."""
        under_way, self._under_way = self._under_way, {}
        self._numbers.clear()
        for _, ticket in under_way.values():
            ticket.cancel()

    def _answered(self, number: int, answer: CallAnswer, on_read: Callable[[], object]) -> None:
        self._remove(number)
        self._reply(_reply_of(number, answer), on_read)

    def _remove(self, number: int) -> CallTicket:
        batch, ticket = self._under_way.pop(number)
        numbers = self._numbers[batch]
        numbers.discard(number)
        if not numbers:
            del self._numbers[batch]
        return ticket


def _reply_of(number: int, answer: CallAnswer) -> CallReply:
    if isinstance(answer, Prediction):
        return CallReply(number, answer)
    return CallReply(
        number, None, answer.status, answer.wire_type, answer.message, answer.retry_after
    )
