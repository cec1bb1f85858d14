"""The time lines of requests as JSON objects: the slowest, the failed, or one."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from marserve.frontend.aio.long_work import Steps
from marserve.frontend.documents import json_steps
from marserve.frontend.errors import BadRequest, RouteNotFound
from marserve.frontend.operations.parameters import Parameters
from marserve.frontend.serving.registry import ModelRegistry
from marserve.frontend.tracing.explanations import Facts, Shares, explain
from marserve.frontend.tracing.time_lines import ModelLines, TimeLine, TimeLines

_DEFAULT_COUNT = 20
_MAX_COUNT = 1000
_DEFAULT_SINCE = 600
# The nested lines in a list; `id` returns all of them.
_LISTED_NESTED = 10
# Of which the usual size is the median.
_USUAL_REQUESTS = 200


@dataclass(frozen=True)
class RequestLines:
    """What operators see of the requests of a server."""

    lines: TimeLines
    registry: ModelRegistry

    def list(self, parameters: Parameters) -> Steps[bytearray]:
        """Return JSON with the slowest requests, the failed ones (``failed``), or one (``id``).

        Raises:
            BadRequest: A number is not valid, or both kinds are requested.
            RouteNotFound: No request of that id is known.
        """
        facts: dict[ModelLines, Facts] = {}
        if parameters.has("id"):
            line = self.lines.find(parameters.text("id"))
            if line is None:
                raise RouteNotFound("No request of that id is known: it is too old, or too quick.")
            documents = [self._document(line, facts, whole=True)]
            return (yield from json_steps({"requests": documents}, indented=False))
        if parameters.has("slowest") and parameters.has("failed"):
            raise BadRequest("Only one of slowest and failed is accepted.")
        is_failed = parameters.has("failed")
        count = parameters.at_least("failed" if is_failed else "slowest", 1) or _DEFAULT_COUNT
        list_lines = self.lines.failed if is_failed else self.lines.slowest
        found = yield from list_lines(min(count, _MAX_COUNT), _filter(parameters))
        listed = (self._document(line, facts) for line in found)
        return (yield from json_steps({"requests": listed}, indented=False))

    def _document(
        self, line: TimeLine, known: dict[ModelLines, Facts], *, whole: bool = False
    ) -> dict[str, Any]:
        if line.model not in known:
            known[line.model] = self._facts(line.model)
        nested: Sequence[TimeLine] = line.nested if whole else line.nested[:_LISTED_NESTED]
        batch, shares = line.batch, Shares.of(line)
        return {
            "id": line.id,
            "modelName": line.model.name,
            "modelVersion": line.model.version or None,
            "arrivedAt": _epoch_ms(line.arrived),
            "tookMs": _ms(line.took),
            "status": line.status,
            "outcome": line.outcome,
            "error": line.error or None,
            "explanation": explain(line, known[line.model]),
            "requestBytes": line.size,
            "traceId": line.trace_id or None,
            "attempts": line.attempts,
            "events": [
                {"name": name, "atMs": _ms(moment - line.arrived)} for name, moment in _events(line)
            ],
            "shares": {
                "receivingMs": _ms(shares.receiving),
                "waitingMs": _ms(shares.waiting),
                "batchingMs": _ms(shares.batching),
                "handOverMs": _ms(shares.hand_over),
                "handlerMs": _ms(shares.handler),
                "answeringMs": _ms(shares.answering),
            },
            "batch": None
            if batch is None
            else {
                "closedAt": _epoch_ms(batch.closed),
                "size": batch.size,
                "ranAs": batch.run_as,
                "reason": batch.reason.value,
                "requestBytes": list(batch.request_bytes),
                "workerId": batch.worker_id,
                "tookMs": _ms(batch.took),
                "predictedMs": _ms(batch.predicted) if batch.predicted else None,
            },
            "nested": (self._document(each, known, whole=whole) for each in nested),
            "nestedLeftOut": len(line.nested) - len(nested) or None,
        }

    def _facts(self, lines: ModelLines) -> Facts:
        for model in self.registry:
            if model.lines is lines:
                sizes = [line.size for line in lines.recent(_USUAL_REQUESTS)]
                return Facts(list(model.batcher.history), sizes, model.workers.history)
        return Facts()


def _filter(parameters: Parameters) -> Callable[[TimeLine], bool]:
    name, version = parameters.text("model"), parameters.text("version")
    start = time.monotonic() - (parameters.at_least("since", 1) or _DEFAULT_SINCE)

    def is_wanted(line: TimeLine) -> bool:
        return (
            line.answered >= start
            and (not name or line.model.name == name)
            and (not version or line.model.version == version)
        )

    return is_wanted


def _events(line: TimeLine) -> list[tuple[str, float]]:
    found = [("received", line.arrived), ("queued", line.queued)]
    if (batch := line.batch) is not None:
        found.append(("batch closed", batch.closed))
        if batch.handler_started:
            found.append(("handler started", batch.handler_started))
            found.append(("handler ended", batch.handler_ended))
    if line.first_piece:
        found.append(("first piece", line.first_piece))
    found.append(("answered", line.answered))
    return sorted(found, key=lambda event: event[1])


def _epoch_ms(moment: float) -> int:
    return round((time.time() - time.monotonic() + moment) * 1000)


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
