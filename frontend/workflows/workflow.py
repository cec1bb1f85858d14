"""A workflow that is served: admits, limits and records its runs."""

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
    """The `Ticket` of a run in a separate task."""

    dispatched = None  # a run has several requests

    def __init__(self, task: "asyncio.Task[None]") -> None:
        self._task = task

    def cancel(self) -> None:
        """Cancel the run."""
        self._task.cancel()


@dataclass(eq=False)
class Workflow:
    """A graph of models under a name.

    Attributes:
        archive: The archive of its registration.
        max_runs: The maximum number of concurrent runs.
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
        """Raise the error with which `run` would refuse a request now.

        Raises:
            ServerBusy: The maximum number of runs is reached.
            ServerStopping, WorkflowNotFound: Requests are no longer accepted.
        """
        if self.refusal is not None:
            raise self.refusal.with_traceback(None)
        if self.runs >= self.max_runs:
            self.graph.metrics.runs["refused"].update(1)
            raise ServerBusy(
                f'Workflow "{self.name}" has {self.max_runs} runs in progress, the maximum '
                "(max_workflow_runs). Try again later."
            )

    async def run(self, request: PredictRequest) -> Prediction:
        """Run all nodes, and return the answer built from the outputs of the leaves.

        The timeout of the request is that of the run. Without one the limit is the time of all
        attempts on the longest path. A cancelled run removes its jobs from their queues.

        Raises:
            NodeFailed: A node failed in every attempt; its cause has the error.
            RequestExpired: The timeout has passed.
            ServerBusy, NoWorker, Overloaded: The workflow, or a model of it, is overloaded.
            TooMuchInFlight: The outputs of its nodes exceed the bytes in flight.
            ServeError: A handler refused its input, or the outputs cannot be joined.
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
        """Run the workflow in a task; ``on_answer`` is called once, after submit has returned.

        Raises:
            ServeError: The request is refused.
        """
        self.check()
        return _RunTicket(asyncio.get_running_loop().create_task(self._answer(request, on_answer)))

    async def _answer(self, request: PredictRequest, on_answer: OnAnswer) -> None:
        answer: Prediction | ServeError
        try:
            answer = await self.run(request)
        except ServeError as error:
            answer = error
        except Exception as error:  # the last resort: the client must get an answer
            logger.exception("Workflow %s cannot be run.", self.name)
            answer = unexpected(error)
        on_answer(answer)

    async def drained(self) -> None:
        """Wait until there is no run, without a deadline; callers set one."""
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
