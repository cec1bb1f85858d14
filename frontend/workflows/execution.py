"""One run of a workflow: a node starts as soon as all its parents have answered.

The task of a node continues with its child; further children that are ready get new tasks. So a
chain needs no task except its caller's. The first failure cancels all other nodes: their jobs leave
their queues. An output is dropped when all children of its node have answered; until then it counts
as in flight.

The start node gets the parts of the request, a node with one parent the parent's output as
``body``, a node with several parents a part for each, by the parent's name. All get the headers of
the request.
"""

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from marserve.backend.protocol import Input, Part, Prediction
from marserve.frontend.batching.jobs import Stream
from marserve.frontend.errors import (
    BadRequest,
    ModelNotFound,
    NodeFailed,
    NoWorker,
    Overloaded,
    PredictionFailed,
    RequestExpired,
    SequenceOver,
    ServeError,
    ServerStopping,
    TooMuchInFlight,
    VersionNotFound,
)
from marserve.frontend.logs.formats import one_line
from marserve.frontend.serving.predict_request import (
    NO_OPTIONS,
    PredictRequest,
    RequestOptions,
    Ticket,
)
from marserve.frontend.serving.registry import ModelRegistry
from marserve.frontend.serving.whole_answers import whole_answer
from marserve.frontend.telemetry.metrics import WorkflowMetrics
from marserve.frontend.tracing.time_lines import NestedLines
from marserve.frontend.workflows.specification import Node, Specification
from marserve.frontend.workflows.timeline import NodeTimes, RunTimes

logger = logging.getLogger(__name__)

# Errors that a retry would repeat: the client must retry later, or start its sequence again.
_NOT_RETRIED = (NoWorker, Overloaded, SequenceOver, ServerStopping, TooMuchInFlight)

_MAX_REFUSAL = 1 << 16  # bytes of an answer with status 400 that are read


@dataclass(frozen=True, eq=False)
class Graph:
    """The common data of all runs of a workflow."""

    name: str
    specification: Specification
    models: ModelRegistry
    metrics: WorkflowMetrics
    max_output_bytes: int  # of a streamed output

    @cached_property
    def model_names(self) -> Mapping[str, str]:
        """The model of each node."""
        return {node: model_name(self.name, node) for node in self.specification.nodes}

    @cached_property
    def options(self) -> Mapping[str, RequestOptions]:
        """The options of each node, for requests without options."""
        nodes = self.specification.nodes
        return {name: RequestOptions(timeout=node.timeout) for name, node in nodes.items()}


class _Answered(Exception):
    """The handler of a node has answered with an error status, which ends the run."""

    def __init__(self, prediction: Prediction) -> None:
        super().__init__()
        self.prediction = prediction


class Run:
    """One run, whose timeout is that of the request."""

    def __init__(self, graph: Graph, request: PredictRequest) -> None:
        self._graph = graph
        self._nodes = graph.specification.nodes
        self._request = request
        self._deadline = request.arrived + request.options.timeout
        self._memory = request.memory
        self._outputs: dict[str, Prediction] = {}
        #: How many children of a node have answered.
        self._answered: Counter[str] = Counter()
        self.times = RunTimes(request.input.id, time.monotonic())
        self.nested = NestedLines()  # of the nodes

    async def outputs(self) -> Mapping[str, Prediction]:
        """Run all nodes; return the outputs of the leaves, or the one with an error status."""
        start, error = self._graph.specification.start, None
        try:
            async with asyncio.TaskGroup() as group:
                await self._run_from(start, group)
        except BaseExceptionGroup as failed:
            error = failed.exceptions[0]
            for each in (failed, *failed.exceptions):  # they are cycles with asyncio's frames
                each.__traceback__ = None
        if isinstance(error, _Answered):
            return {"": error.prediction}
        if error is not None:
            raise error from error.__cause__  # not above: the group would be its context
        leaves = self._graph.specification.leaves
        return {name: self._outputs[name] for name in leaves}

    async def _run_from(self, node: Node, group: asyncio.TaskGroup) -> None:
        next_: Node | None = node
        while next_ is not None:
            node, next_ = next_, None
            self._outputs[node.name] = await self._output_of(node)
            self._drop_parts(node)
            for name in node.children:
                child = self._nodes[name]
                if not all(parent in self._outputs for parent in child.parents):
                    continue
                if next_ is None:
                    next_ = child
                else:
                    group.create_task(self._run_from(child, group))

    def _parts(self, node: Node) -> list[Part]:
        if not node.parents:
            return self._request.input.parts
        names = node.parents if len(node.parents) > 1 else ("body",)
        outputs = [self._outputs[parent].body for parent in node.parents]
        return [Part(name, "", body) for name, body in zip(names, outputs, strict=True)]

    def _drop_parts(self, node: Node) -> None:
        self._answered.update(node.parents)
        for parent in node.parents:
            if self._answered[parent] == len(self._nodes[parent].children):
                self._memory.release(len(self._outputs.pop(parent).body))

    async def _output_of(self, node: Node) -> Prediction:
        times = NodeTimes(node.name, time.monotonic())
        self.times.nodes.append(times)
        try:
            prediction = await self._try_until_answered(node, times)
            if node.parents and prediction.status == BadRequest.status:
                self._check_refusal(node, prediction)
            times.outcome = "answered"
        except ServeError as error:
            times.outcome = "expired" if isinstance(error, RequestExpired) else "failed"
            raise
        finally:
            times.ended = time.monotonic()
        self._graph.metrics.node_seconds[node.name].update(times.ended - times.queued)
        if prediction.status >= 400:
            headers = {**prediction.headers, "x-failed-node": node.name}
            raise _Answered(replace(prediction, headers=headers))
        return prediction

    def _check_refusal(self, node: Node, prediction: Prediction) -> None:
        """Raise NodeFailed if an envelope or a handler of ours has refused the input of the node.

        The input is the output of other nodes, so that the fault is not the client's. What a
        handler's author has written is passed on.
        """
        try:
            body = json.loads(bytes(prediction.body[:_MAX_REFUSAL]))
            is_refusal, reason = body["type"] == BadRequest.wire_type, str(body["message"])
        except (ValueError, RecursionError, TypeError, KeyError):
            return
        if is_refusal:
            given, name = _input_of(node), self._graph.name
            logger.warning(
                "Workflow %s: %s refused %s: %s", name, node.name, given, one_line(reason)
            )
            why = f": it refused its input, {given}. {reason}"
            raise NodeFailed(node.name, BadRequest(reason), why)

    async def _try_until_answered(self, node: Node, times: NodeTimes) -> Prediction:
        while True:
            start = time.monotonic()
            left = self._deadline - start
            if left <= 0:
                raise self._expired()
            times.attempts += 1
            try:
                return await self._try(node, times, start, min(node.timeout, left))
            except ServeError as error:
                # The traceback refers to inputs, outputs, and other runs of the same batch.
                error.__traceback__ = None
                self._graph.metrics.failed_tries[node.name].update(1)
                # Timers are up to a millisecond early.
                is_over = isinstance(error, RequestExpired) and left <= node.timeout
                if is_over or time.monotonic() >= self._deadline:
                    raise self._expired() from error
                if isinstance(error, PredictionFailed) and 400 <= error.status < 500:
                    raise _named(node, error) from None
                if isinstance(error, _NOT_RETRIED):
                    raise
                is_gone = isinstance(error, ModelNotFound | VersionNotFound)
                if is_gone or times.is_final or times.attempts >= node.tries:
                    logger.warning(
                        "Workflow %s: %s failed at try %d of %d: %s",
                        self._graph.name,
                        node.name,
                        times.attempts,
                        node.tries,
                        one_line(error),
                    )
                    raise NodeFailed(node.name, _cause(node, error)) from error

    async def _try(self, node: Node, times: NodeTimes, start: float, timeout: float) -> Prediction:
        request = self._request_of(node, times.attempts, start, timeout)
        model = self._graph.models.find(self._graph.model_names[node.name])
        tickets: list[Ticket] = []
        try:
            prediction = await model.predict(request, tickets.append)
        finally:
            if tickets:
                times.started = tickets[0].dispatched
                times.is_final = times.started is not None and not model.repeats_requests
        if isinstance(prediction, Stream):
            deadline, limit = start + timeout, self._graph.max_output_bytes
            return await whole_answer(prediction, deadline, limit, self._memory)
        self._memory.hold(len(prediction.body))
        return prediction

    def _request_of(self, node: Node, attempt: int, start: float, timeout: float) -> PredictRequest:
        whole = self._request
        again = f".{attempt}" if attempt > 1 else ""  # the worker may still have the earlier one
        id_ = f"{whole.input.id}.{node.name}{again}"
        headers, trace = dict(whole.input.headers), whole.trace
        if trace is not None:
            trace = trace.caused()
            headers = trace.applied_to(headers)
        input_ = Input(id_, headers, self._parts(node))
        options = whole.options
        if options is NO_OPTIONS:  # the same object for all runs
            options = self._graph.options[node.name]
        elif timeout < options.timeout:
            options = replace(options, timeout=timeout)
        return PredictRequest(
            input_,
            self._memory,
            start,
            by_version=False,
            options=options,
            continues=True,
            nested_in=self.nested,
            trace=trace,
        )

    def _expired(self) -> RequestExpired:
        milliseconds = round(self._request.options.timeout * 1000)
        return RequestExpired(f"No answer within X-Timeout-Ms={milliseconds}.")


def model_name(workflow: str, node: str) -> str:
    """The name of a node's model."""
    return f"{workflow}__{node}"


def _input_of(node: Node) -> str:
    """Return what the input of a node with parents is."""
    noun = "the output" if len(node.parents) == 1 else "the outputs"
    return f"{noun} of {' and '.join(node.parents)}"


def _named(node: Node, error: PredictionFailed) -> PredictionFailed:
    """Return the error that a handler has raised, with the name of a node that has parents."""
    if not node.parents:
        return error
    message = f"Error executing {node.name} with {_input_of(node)}: {error.message}"
    return PredictionFailed(message, status=error.status, cause=error.cause)


def _cause(node: Node, error: ServeError) -> ServeError:
    """Return the error of a node, whose time limit is not the client's."""
    if isinstance(error, RequestExpired):
        return RequestExpired(f"No output within timeout-ms={node.settings.timeout_ms}.")
    return error
