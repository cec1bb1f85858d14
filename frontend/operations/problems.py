"""What is wrong now, in sentences: models that cannot answer, fail, refuse or are slow."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from statistics import median
from typing import Any

from marserve.frontend.batching.batches import Batch
from marserve.frontend.batching.jobs import Group
from marserve.frontend.operations.traffic import Traffic
from marserve.frontend.serving.model_version import ModelVersion
from marserve.frontend.serving.predict_request import HANDLER_STATUS
from marserve.frontend.serving.registry import ModelRegistry
from marserve.frontend.tracing.explanations import time_text

# Shares of the requests of the last minute.
_MANY_FAILED = 0.05
_MANY_REFUSED = 0.01
_NEARLY_FULL = 0.8
# How many times the usual time a running batch, or the batches of a worker, take.
_LATE = 5.0
_SLOW = 3.0
_LATE_SECONDS = 1.0
_COMPARED_BATCHES = 100
_MIN_BATCHES = 5  # of a worker
_MAX_TEXT = 300
# A crash loop: this many failures of a model's workers in these seconds.
_LOOP_FAILURES = 3
_LOOP_SECONDS = 300.0
_OUTPUT_LINES = 3
_FAILURES = (HANDLER_STATUS, "handler", "worker_died", "broken")
_REFUSALS = {
    "queue_full": "the queue was full",
    "no_worker": "there was no worker",
    "overloaded": "they could not be answered in time",
    "expired": "their time was over",
}


@dataclass(frozen=True)
class Problem:
    """A sentence about a model, or about the server if the name is empty."""

    text: str
    name: str = ""
    version: str = ""
    is_error: bool = False

    def document(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {
            "severity": "error" if self.is_error else "warning",
            "modelName": self.name or None,
            "modelVersion": self.version or None,
            "text": self.text,
        }


def server_problems(registry: ModelRegistry) -> Iterator[Problem]:
    """Iterate over what is wrong with the server as a whole, and over failed loads."""
    if registry.is_leaving:
        yield Problem("The server is stopping.", is_error=True)
    if registry.catalog_progress.trouble:
        yield Problem(f"The catalog: {registry.catalog_progress.trouble}", is_error=True)
    for load in registry.failed.listed():
        text = f"{load.name} could not be loaded: {_short(load.reason)}"
        yield Problem(text, load.name, load.version, is_error=True)


def model_problems(model: ModelVersion, traffic: Traffic) -> Iterator[Problem]:
    """Iterate over what is wrong with a model, the worst first."""

    def problem(text: str, *, is_error: bool = False) -> Problem:
        return Problem(text, model.name, model.version, is_error)

    yield from (problem(text, is_error=True) for text in _about_workers(model))
    errors = traffic.errors
    # Answers of a handler with a status of 500 or more are among those answered.
    total = traffic.answered + errors.total() - errors[HANDLER_STATUS]
    failed = sum(errors[reason] for reason in _FAILURES)
    if failed and failed >= _MANY_FAILED * total:
        last = model.lines.last_failure()
        why = f" The last error: {_short(last.error or f'status {last.status}')}" if last else ""
        yield problem(
            f"{failed} of {total} requests of {model.name} failed in the last minute.{why}",
            is_error=True,
        )
    for reason, text in _REFUSALS.items():
        if errors[reason] and errors[reason] >= _MANY_REFUSED * total:
            yield problem(
                f"{errors[reason]} of {total} requests of {model.name} were refused in the last "
                f"minute: {text}.",
                is_error=True,
            )
    queued, bound = model.queued, model.queued + model.free_capacity
    if bound and queued >= _NEARLY_FULL * bound:
        yield problem(
            f"{queued} requests wait for {model.workers.ready} ready workers of {model.name}; the "
            f"queue has capacity for {bound}."
        )
    yield from map(problem, _about_speed(model))
    goal = model.settings.batching.goal
    if traffic.percentiles and traffic.percentiles[-1] > goal:
        p99 = traffic.percentiles[-1]
        yield problem(
            f"1 % of the requests of {model.name} take more than {time_text(p99)}; the goal is "
            f"max_latency_ms={goal * 1000:g}."
        )


def _about_workers(model: ModelVersion) -> Iterator[str]:
    workers = list(model.workers)
    given_up = sum(worker.is_stopped for worker in workers)
    unready = sum(not worker.is_ready for worker in workers) - given_up
    failure = model.workers.last_failure
    why = f": {_short(failure.reason)}" if failure else "."
    if workers and not model.workers.is_open:
        yield f"{model.name} has no worker{why}"
    elif given_up:
        yield f"{given_up} of {len(workers)} workers of {model.name} are given up{why}"
    elif unready and failure and not crash_loop(model):
        yield f"{unready} of {len(workers)} workers of {model.name} are restarting{why}"
    if model.workers.is_open and (failures := crash_loop(model)):
        yield (
            f"The workers of {model.name} have failed {failures} times in the last "
            f"{_LOOP_SECONDS / 60:.0f} minutes{_last_end(model)}"
        )


def crash_loop(model: ModelVersion) -> int:
    """Return how often the workers of a model failed lately; 0 if they do not keep failing."""
    failures = model.workers.history.failures(_LOOP_SECONDS)
    return failures if failures >= _LOOP_FAILURES else 0


def _last_end(model: ModelVersion) -> str:
    failures = [worker.last_failure for worker in model.workers if worker.last_failure]
    if not failures:  # those that failed are gone
        return "."
    failure = max(failures, key=attrgetter("moment"))
    output = " | ".join(failure.diagnostics.output[-_OUTPUT_LINES:])
    return f": {_short(failure.reason)}" + (f" Its last output: {_short(output)}" if output else "")


def _about_speed(model: ModelVersion) -> Iterator[str]:
    """Compare the batches that run, and those of each worker, with their usual time."""
    now = time.monotonic()
    for batcher in model.workers.batchers:
        for batch in batcher.workers.busy:
            # Others have no usual time: coroutines, steps, explanations, the first batches.
            if not isinstance(batch, Batch) or not batch.predicted or not batch.jobs:
                continue
            if batch.jobs[0].group is Group.PREDICT:
                took, usual = now - batch.closed, batch.predicted
                if took > max(_LATE_SECONDS, _LATE * usual):
                    yield (
                        f"Worker {batch.worker_id} of {model.name} has run a batch of {batch.size} "
                        f"for {time_text(took)}, usually {time_text(usual)}: its process is "
                        "stopped, or its handler hangs."
                    )
    ratios: dict[int, list[float]] = {}
    for batch in islice(reversed(model.batcher.history), _COMPARED_BATCHES):
        if batch.predicted:
            ratios.setdefault(batch.worker_id, []).append(batch.took / batch.predicted)
    medians = {
        worker_id: median(values)
        for worker_id, values in ratios.items()
        if len(values) >= _MIN_BATCHES
    }
    for worker_id, ratio in medians.items():
        others = [each for other, each in medians.items() if other != worker_id]
        if others and ratio > _SLOW * median(others):
            yield (
                f"Worker {worker_id} of {model.name} takes {ratio / median(others):.0f} times as "
                "long as the others."
            )


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MAX_TEXT else f"{line[:_MAX_TEXT]}..."
