"""The workflows that are served: each admits, limits and records its runs."""

import asyncio
import http
import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from marserve.backend.protocol import Buffer, Prediction
from marserve.frontend.aio.json_items import UNREADABLE, Text, check_json, load_strictly, text_of
from marserve.frontend.aio.long_work import Steps, joined
from marserve.frontend.archives.archive import Archive
from marserve.frontend.batching.jobs import OnAnswer
from marserve.frontend.errors import ServeError, ServerBusy, WorkflowNotFound
from marserve.frontend.serving.answer_tasks import AnswerTask
from marserve.frontend.serving.predict_request import PredictRequest, Ticket, outcome_of
from marserve.frontend.tracing.time_lines import ModelLines, TimeLine
from marserve.frontend.workflows.execution import Graph, Run
from marserve.frontend.workflows.timeline import RunTimes

_MAX_RUNS_KEPT = 100
_JSON = "application/json"
_PHRASES = {status.value: status.phrase for status in http.HTTPStatus}


@dataclass(eq=False)
class Workflow:
    """A graph of models under a name."""

    archive: Archive
    graph: Graph
    max_runs: int  # at the same time
    lines: ModelLines

    def __post_init__(self) -> None:
        self.name = self.graph.name
        self.specification = self.graph.specification
        self.timeline: deque[RunTimes] = deque(maxlen=_MAX_RUNS_KEPT)
        #: Makes the error for every request; None while they are accepted.
        self.refusal: Callable[[], ServeError] | None = None
        self.runs = 0
        self._drained = asyncio.Event()

    @property
    def is_full(self) -> bool:
        """Whether no further run may start now."""
        return self.runs >= self.max_runs

    def check(self, request: PredictRequest) -> None:
        """Raise the error with which `run` would refuse a request now, and record the refusal."""
        if self.refusal is not None:
            raise self.refusal()
        if self.is_full:
            raise self._refused(request)

    def _refused(self, request: PredictRequest) -> ServerBusy:
        self.graph.metrics.runs["refused"].update(1)
        sentence = (
            f'Workflow "{self.name}" has {self.max_runs} runs in progress, the maximum '
            "(max_workflow_runs). Try again later."
        )
        arrived, now, trace = request.arrived, time.monotonic(), request.trace
        self.lines.refused(request.input.id, arrived, now, ServerBusy.status, sentence, trace)
        return ServerBusy(sentence)

    async def run(self, request: PredictRequest) -> Prediction:
        """Run all nodes, and return the answer built from the outputs of the leaves.

        The timeout of the request is that of the run. Without one the limit is the time of all
        attempts on the longest path. A cancelled run removes its jobs from their queues.
        """
        self.check(request)
        self.runs += 1
        run = Run(self.graph, request)
        answer: Prediction | ServeError | None = None  # None if the client leaves
        try:
            answer = await request.memory.run(answer_of(await run.outputs()))
        except ServeError as error:
            answer = error
            raise
        finally:
            self._end(run, request, answer)
        return answer

    def submit(self, request: PredictRequest, on_answer: OnAnswer) -> Ticket:
        """Run the workflow in a task; ``on_answer`` is called once, after submit has returned."""
        self.check(request)
        return AnswerTask(partial(self.run, request), on_answer, f"Workflow {self.name}")

    async def drained(self) -> None:
        """Wait until there is no run, without a deadline; callers set one."""
        while self.runs:
            self._drained.clear()
            await self._drained.wait()

    def _end(
        self, run: Run, request: PredictRequest, answer: Prediction | ServeError | None
    ) -> None:
        self.runs -= 1
        if not self.runs:
            self._drained.set()
        metrics, times = self.graph.metrics, run.times
        outcome, status, error = outcome_of(answer)
        times.ended = now = time.monotonic()
        times.outcome = "answered" if isinstance(answer, Prediction) else outcome
        self.timeline.append(times)
        self.lines.add(
            TimeLine(
                request.input.id,
                self.lines,
                request.arrived,
                times.started,
                None,
                now,
                outcome,
                status,
                error,
                request.input.size,
                nested=run.nested,
                trace=request.trace,
            )
        )
        metrics.runs[times.outcome].update(1)
        if isinstance(answer, Prediction):
            metrics.seconds.update(now - request.arrived)


class WorkflowRegistry:
    """The workflows that are served, by name. Only `WorkflowRegistrar` changes them."""

    def __init__(self) -> None:
        self._workflows: dict[str, Workflow] = {}

    def __iter__(self) -> Iterator[Workflow]:
        for _, workflow in sorted(self._workflows.items()):
            yield workflow

    def __contains__(self, name: str) -> bool:
        return name in self._workflows

    def find(self, name: str) -> Workflow:
        """Return the workflow of that name, or raise WorkflowNotFound."""
        workflow = self._workflows.get(name)
        if workflow is None:
            raise WorkflowNotFound(f"Workflow not found: {name}")
        return workflow

    def add(self, workflow: Workflow) -> None:
        """Add a workflow; its name is not in use."""
        self._workflows[workflow.name] = workflow

    def remove(self, workflow: Workflow) -> None:
        """Remove a workflow."""
        del self._workflows[workflow.name]

    async def drained(self) -> None:
        """Wait until no workflow runs, without a deadline; callers set one."""
        for workflow in list(self._workflows.values()):
            await workflow.drained()


def answer_of(outputs: Mapping[str, Prediction]) -> Steps[Prediction]:
    """Return the output of a single leaf unchanged, or a JSON object with a member for each leaf.

    The output of a single leaf keeps the status and headers of its handler. Its default content
    type is JSON, as in TorchServe, and it gets the standard reason phrase.
    """
    if len(outputs) == 1:
        [output] = outputs.values()
        names = {name.lower() for name in output.headers}
        headers = {} if "content-type" in names else {"content-type": _JSON}
        yield from ()
        reason = output.reason or _PHRASES.get(output.status, "")
        return Prediction(output.body, output.status, reason, headers | output.headers)
    pieces: list[Buffer] = []
    for name, output in outputs.items():
        before = f"{',' if pieces else '{'}\n  {json.dumps(name, ensure_ascii=False)}: "
        pieces += (before.encode(), (yield from _json_text(name, output.body)))
        yield len(pieces[-1])
    body = yield from joined([*pieces, b"\n}\n"])
    return Prediction(body, 200, _PHRASES[200], {"content-type": _JSON})


def _json_text(name: str, body: Buffer) -> Steps[Text]:
    """Return an output as JSON: unchanged if it is JSON, else as a string."""
    text = text_of(body)
    try:
        text.decode()
    except UnicodeDecodeError as error:
        raise ServeError(
            f"The output of {name} is neither JSON nor text, and the workflow has other leaves."
        ) from error
    try:
        start, stop = yield from check_json(text, load_strictly)
    except UNREADABLE:
        return json.dumps(text.decode(), ensure_ascii=False).encode()
    return text[start:stop]
