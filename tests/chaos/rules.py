"""What is allowed: which outcome a request may have, by what went wrong while it was under way.

    200 with its own payload          always
    200 with anything else            never; nor a second answer, nor an answer nobody asked for
    no answer in ANSWER_SECONDS       never (not counting while the frontend itself was stopped)
    connection lost                   the frontend was killed; a new connection while descriptors
                                      were short, or while the frontend was stopped for longer than
                                      the head of a request may take; an answer in pieces, if its
                                      worker died or its batch failed: nobody can take back what
                                      was sent
    500 "Worker died"                 a request that crashed its worker; another one only if two
                                      workers died while it was under way, or it was alone in one
                                      that was stopped: who hangs alone is to blame
    503 "Prediction failed"           a request that made the handler raise; with continuous
                                      batching those of the same step; of others at most
                                      MATES_SHARE, for splitting failed batches has its bounds
    503 no worker                     while workers could not be started
    503 not loaded yet                after a start with a catalog, until all is loaded
    409                               a request of a sequence whose worker was lost or taken away
    any failure                       of a workflow, or of a model that calls another: if a model
                                      behind it had a fault
    any other                         what the request itself asked for

Requests to an engine have no batch: one that fails is no excuse for another, unless it ends the
engine, and then the other is repeated.

Requests that ask for a failure must get it, or one of those above.
"""

from collections.abc import Callable
from dataclasses import dataclass

from chaos.http_client import Answer
from chaos.served import MISDEEDS, Request, is_expected
from chaos.timeline import Timeline

#: Seconds in which every accepted request is answered: a worker hangs for RESPONSE_SECONDS, is
#: replaced, its requests are tried once more, and others may hang before them.
ANSWER_SECONDS = 30.0
#: The share of innocents that may fail with a batch.
MATES_SHARE = 0.01

#: Kinds of faults in the timeline.
FRONTEND_DOWN = "frontend down"
FRONTEND_STOPPED = "frontend stopped"
WORKER_LOST = "worker lost"
WORKER_STOPPED = "worker stopped"
NO_STARTS = "workers cannot start"
NO_DESCRIPTORS = "descriptors are short"
CRASHING_REQUEST = "crashing request"
FAILING_REQUEST = "failing request"
GONE = "model is gone"
SCALED = "workers are taken away"
NOT_LOADED = "models of the catalog are being loaded"

#: Seconds after which a client of a sequence notices at the latest that its state is lost.
_SEQUENCE_SECONDS = 5.0
# What ends an answer that has begun.
_ENDING = (WORKER_LOST, WORKER_STOPPED, CRASHING_REQUEST)
_BREAKING = (*_ENDING, FAILING_REQUEST)
#: The verdict on an innocent that failed with its batch.
MATE_FAILED = "failed with its batch"


@dataclass(frozen=True)
class Outcome:
    """What became of a request between two moments: an answer, or how it was lost."""

    since: float
    until: float
    answer: Answer | None
    lost: str = ""
    on_new_connection: bool = False

    def __str__(self) -> str:
        """For reports."""
        if self.answer is None:
            return f"no answer: {self.lost}, {self.until - self.since:.2f} s after it was sent"
        return (
            f"{self.answer.status} {self.answer.text[:200]!r} after {self.until - self.since:.2f} s"
        )


@dataclass(frozen=True)
class Verdict:
    """What an outcome counts as, and whether it is a violation."""

    label: str
    is_allowed: bool = True


def judge(request: Request, outcome: Outcome, timeline: Timeline) -> Verdict:
    """See the module."""
    answer = outcome.answer
    if answer is None:
        return _judge_lost(request, outcome, timeline)
    if answer.status == 200:
        if not is_expected(request, answer.text):
            return Verdict("another payload", is_allowed=False)
        return Verdict("200", 200 in MISDEEDS.get(request.misdeed, {200}))
    if answer.status in MISDEEDS.get(request.misdeed, ()):
        return Verdict(f"{answer.status} as asked for")
    return _judge_failure(request, outcome, timeline, answer)


def _judge_lost(request: Request, outcome: Outcome, timeline: Timeline) -> Verdict:
    def felt(kind: str) -> int:
        return timeline.count(kind, request.model.name, outcome.since, outcome.until)

    if felt(FRONTEND_DOWN):
        return Verdict("lost with the frontend")
    if outcome.lost == "late":
        return Verdict("late", is_allowed=False)
    if outcome.on_new_connection and felt(NO_DESCRIPTORS):
        return Verdict("refused for want of descriptors")
    if outcome.on_new_connection and felt(FRONTEND_STOPPED):
        return Verdict("not read before the frontend stopped")
    is_broken_off = outcome.lost.startswith("broken off")
    if is_broken_off and request.streams:
        kinds = _ENDING if request.model.is_engine else _BREAKING
        return Verdict("broken off", bool(request.misdeed or any(map(felt, kinds))))
    return Verdict("lost", is_allowed=False)


def _judge_failure(
    request: Request, outcome: Outcome, timeline: Timeline, answer: Answer
) -> Verdict:
    model = request.model

    def felt(kind: str, seconds: float = 0.0) -> int:
        names, since = (model.name, *model.behind), outcome.since - seconds
        return sum(timeline.count(kind, name, since, outcome.until) for name in names)

    text = answer.text
    if answer.status == 500 and "Worker died" in text and "broken off" not in text:
        crashes = felt(WORKER_LOST) + 2 * (felt(CRASHING_REQUEST) + felt(WORKER_STOPPED))
        return Verdict("500 after two crashes", crashes >= 2)
    if _is_of_batch(answer) and not model.is_engine:
        if request.misdeed or model.form in ("steps", "sequence"):
            is_due = request.misdeed or felt(FAILING_REQUEST) or felt(CRASHING_REQUEST)
            return Verdict("failed with its step", bool(is_due))
        # How many of these there may be is told when the run is over.
        return Verdict(MATE_FAILED, bool(felt(FAILING_REQUEST) or felt(CRASHING_REQUEST)))
    if answer.status == 503 and "has no worker" in text:
        return Verdict("503 no worker", bool(felt(NO_STARTS) or felt(GONE)))
    if answer.status == 503 and "Too many connections" in text:
        is_short = outcome.on_new_connection and felt(NO_DESCRIPTORS)
        return Verdict("503 for want of descriptors", bool(is_short))
    if answer.status == 503 and "not loaded yet" in text:
        return Verdict("503 not loaded yet", bool(felt(NOT_LOADED) or felt(FRONTEND_DOWN)))
    if answer.status == 503 and "stopping" in text:
        return Verdict("503 stopping", bool(felt(FRONTEND_DOWN)))
    if answer.status == 404 and not model.workflow:
        return Verdict("404", bool(felt(GONE)))
    return _judge_mode(request, answer, felt)


def _judge_mode(request: Request, answer: Answer, felt: Callable[..., int]) -> Verdict:
    """Failures that only some modes of serving have."""
    model, status, text = request.model, answer.status, answer.text
    if status == 409 and model.form == "sequence":
        lost = any(felt(kind, _SEQUENCE_SECONDS) for kind in (*_BREAKING, SCALED, FRONTEND_DOWN))
        return Verdict("409 state is lost", lost)
    if status == 503 and "No slot was free" in text:  # its time passed while nothing could move
        return Verdict("503 no slot", bool(felt(FRONTEND_STOPPED) or any(map(felt, _BREAKING))))
    if request.streams and "broken off" in text:  # of a call for a whole answer
        return Verdict("broken off", bool(request.misdeed or any(map(felt, _BREAKING))))
    if model.workflow or model.behind:
        is_due = request.misdeed or any(map(felt, (*_BREAKING, NO_STARTS, FRONTEND_DOWN)))
        return Verdict(f"{status} of a part", bool(is_due))
    return Verdict(f"{status}", is_allowed=False)


def _is_of_batch(answer: Answer) -> bool:
    """Whether it tells of a failure of the whole batch."""
    return "Prediction failed" in answer.text or answer.status in (418, 507)
