"""A workflow that is served: it admits runs, bounds them, and records how they went."""

import asyncio
import logging
import time
from dataclasses import dataclass

from marserve.backend.protocol import Prediction
from marserve.frontend.aio.long_work import LongWork
from marserve.frontend.archives.archive import Archive
from marserve.frontend.batching.jobs import OnAnswer
from marserve.frontend.errors import RequestExpired, ServeError, ServerBusy, unexpected
from marserve.frontend.serving.predict_request import PredictRequest, Ticket
from marserve.frontend.workflows.answers import answer_of
from marserve.frontend.workflows.execution import Graph, Run
from marserve.frontend.workflows.timeline import Timeline

logger = logging.getLogger(__name__)


class _RunTicket:
    """The `Ticket` of a run in a task of its own."""

    dispatched = None  # there are several requests behind it

    def __init__(self, task: "asyncio.Task[None]") -> None:
        self._task = task

    def cancel(self) -> None:
        """See `Ticket.cancel`."""
        self._task.cancel()


@dataclass(eq=False)
class Workflow:
    """A graph of models under a name.

    Attributes:
        archive: What it was registered from.
        max_runs: How many there may be at once.
        timeline: The last runs.
        refusal: The error that every request gets; None while requests are accepted.
    """

    archive: Archive
    graph: Graph
    max_runs: int
    long_work: LongWork

    def __post_init__(self) -> None:
        self.name = self.graph.name
        self.specification = self.graph.specification
        self.timeline = Timeline()
        self.refusal: ServeError | None = None
        self.runs = 0
        self._drained = asyncio.Event()

    def check(self) -> None:
        """Raise what `run` would raise now; the input need not be read yet.

        Raises:
            ServerBusy: As many runs are under way as there may be.
            ServerStopping, WorkflowNotFound: It takes no more.
        """
        if self.refusal is not None:
            raise self.refusal.with_traceback(None)
        if self.runs >= self.max_runs:
            self.graph.metrics.runs["refused"].update(1)
            raise ServerBusy(
                f'Workflow "{self.name}" has {self.max_runs} runs under way, and may not have '
                "more (max_workflow_runs). Try again later."
            )

    async def run(self, request: PredictRequest) -> Prediction:
        """Ask all nodes, and make one answer of what the leaves say.

        The time of the request counts for the whole. Without one it takes no longer than all tries
        of the nodes on the longest path may take. Cancelled, it takes its jobs from their queues.

        Raises:
            NodeFailed: A node failed at every try; its cause says how.
            RequestExpired: The time was over.
            ServerBusy, NoWorker, Overloaded: It, or a model of it, has too much to do.
            TooMuchInFlight: The outputs of its nodes do not fit into the memory.
            ServeError: A handler refused its input, or the outputs do not make one answer.
        """
        self.check()
        self.runs += 1
        run = Run(self.graph, request)
        outcome = "cancelled"
        try:
            with run.holding:
                answer = await self.long_work.run(answer_of(await run.outputs()))
            outcome = "answered"
        except RequestExpired:
            outcome = "expired"
            raise
        except ServeError:
            outcome = "failed"
            raise
        finally:
            self._end(run, request.arrived, outcome)
        return answer

    def submit(self, request: PredictRequest, on_answer: OnAnswer) -> Ticket:
        """Run it in a task; ``on_answer`` is called as by `ModelVersion.submit`.

        Raises:
            ServeError: See `check`.
        """
        self.check()
        return _RunTicket(asyncio.get_running_loop().create_task(self._answer(request, on_answer)))

    async def _answer(self, request: PredictRequest, on_answer: OnAnswer) -> None:
        answer: Prediction | ServeError
        try:
            answer = await self.run(request)
        except ServeError as error:
            answer = error
        except Exception as error:  # a defect of ours, which must not leave the client waiting
            logger.exception("Workflow %s cannot be run.", self.name)
            answer = unexpected(error)
        on_answer(answer)

    async def drained(self) -> None:
        """Wait until no run is under way, without a deadline; callers set one."""
        while self.runs:
            self._drained.clear()
            await self._drained.wait()

    def _end(self, run: Run, arrived: float, outcome: str) -> None:
        self.runs -= 1
        if not self.runs:
            self._drained.set()
        metrics, times = self.graph.metrics, run.times
        times.ended, times.outcome = time.monotonic(), outcome
        self.timeline.add(times)
        metrics.runs[outcome].update(1)
        if outcome == "answered":
            metrics.seconds.update(times.ended - arrived)
