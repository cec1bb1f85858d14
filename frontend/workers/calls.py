"""The calls that handlers make to other models (`Context.infer`), for one worker process.

A call is made on behalf of a job in the worker, and cancelled when that job ends. Every call is
answered once, unless its handler has cancelled it or the worker is dead.
"""

from collections.abc import Callable
from functools import partial
from typing import Protocol

from marserve.backend.protocol import Call, CallReply, Prediction
from marserve.frontend.batching.jobs import Job
from marserve.frontend.errors import CallerGone, ServeError, ServerBusy

#: The largest number of unanswered calls of a worker.
MAX_CALLS = 1000


class CallTicket(Protocol):
    """Handle of a call that is not answered yet."""

    def cancel(self) -> None:
        """Stop waiting for the answer. Safe at any time."""


CallAnswer = Prediction | ServeError

#: Receives the answer, and a function to call when the worker has read it.
OnCallAnswer = Callable[[CallAnswer, Callable[[], object]], None]

#: Calls a model on behalf of a job; the callback is called once, later. Raises ServeError to refuse
#: the call.
CallModel = Callable[[Job, Call, OnCallAnswer], CallTicket]


def no_calls(_caller: Job, _call: Call, _on_answer: OnCallAnswer) -> CallTicket:
    """Refuse all calls."""
    raise ServeError("Models cannot be called here.")


class WorkerCalls:
    """The calls of one worker process, answered by `WorkerConnection.reply_to_call`."""

    def __init__(self, call_model: CallModel, reply: Callable[..., None]) -> None:
        #: Called with the number of a batch when its job ends.
        self.on_job_end: Callable[[int], object] = self.end
        self._call_model = call_model
        self._reply = reply
        #: By number of the call: the number of its batch, and its ticket.
        self._unanswered: dict[int, tuple[int, CallTicket]] = {}
        #: By number of the batch: the numbers of its calls.
        self._numbers: dict[int, set[int]] = {}

    @property
    def has_unanswered(self) -> bool:
        """Whether a call is not answered yet."""
        return bool(self._unanswered)

    def waits_for(self, batch: int) -> bool:
        """Return whether a call of this batch is not answered yet."""
        return batch in self._numbers

    def begin(self, caller: Job | None, call: Call) -> None:
        """Make a call on behalf of a job; ``caller`` is None if that is answered."""
        number, batch = call.number, call.batch
        try:
            if caller is None or not caller.is_open or number in self._unanswered:
                raise CallerGone
            if len(self._unanswered) >= MAX_CALLS:
                raise ServerBusy(f"The worker has {MAX_CALLS} unanswered calls of models.")
            ticket = self._call_model(caller, call, partial(self._answered, number))
        except ServeError as error:
            self._reply(_reply_of(number, error))
            return
        self._unanswered[number] = batch, ticket
        self._numbers.setdefault(batch, set()).add(number)
        caller.notify_end(partial(self.on_job_end, batch))

    def cancel(self, number: int) -> None:
        """Cancel a call whose handler does not wait for it any more."""
        if number in self._unanswered:
            self._remove(number).cancel()

    def end(self, batch: int) -> None:
        """Cancel the calls of a batch that has ended."""
        for number in self._numbers.pop(batch, ()):
            _, ticket = self._unanswered.pop(number)
            ticket.cancel()
            self._reply(_reply_of(number, CallerGone()))

    def close(self) -> None:
        """Cancel all calls: the worker is dead."""
        unanswered, self._unanswered = self._unanswered, {}
        self._numbers.clear()
        for _, ticket in unanswered.values():
            ticket.cancel()

    def _answered(self, number: int, answer: CallAnswer, on_read: Callable[[], object]) -> None:
        self._remove(number)
        self._reply(_reply_of(number, answer), on_read)

    def _remove(self, number: int) -> CallTicket:
        batch, ticket = self._unanswered.pop(number)
        numbers = self._numbers[batch]
        numbers.discard(number)
        if not numbers:
            del self._numbers[batch]
        return ticket


def _reply_of(number: int, answer: CallAnswer) -> CallReply:
    if isinstance(answer, Prediction):
        return CallReply(number, answer)
    answer.drop_frames()
    return CallReply(
        number, None, answer.status, answer.wire_type, answer.message, answer.retry_after
    )
