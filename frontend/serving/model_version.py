"""One version of a model: its queue, batcher and workers, and `submit`, the entry of requests."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, ClassVar, TypeVar

from marserve.backend.manifest import Manifest
from marserve.backend.protocol import Input, Prediction
from marserve.frontend.archives.archive import Archive
from marserve.frontend.archives.requirements import ModelEnvironment
from marserve.frontend.batching.batcher import Batcher
from marserve.frontend.batching.job_queue import JobQueue
from marserve.frontend.batching.jobs import OnAnswer, Priority, Stream
from marserve.frontend.configuration.model_entry import ModelEntry
from marserve.frontend.errors import ServeError
from marserve.frontend.serving.admission import Admission
from marserve.frontend.serving.fullness import Fullness, Use
from marserve.frontend.serving.host import WorkerHost
from marserve.frontend.serving.predict_request import (
    OnJointAnswer,
    PendingRequests,
    PredictRequest,
    Ticket,
)
from marserve.frontend.serving.request_rows import Rows, jobs_of
from marserve.frontend.serving.worker_pool import WorkerPool
from marserve.frontend.serving.worker_spec import ServedModel
from marserve.frontend.settings.layers import REQUEST
from marserve.frontend.settings.model_settings import ModelSettings
from marserve.frontend.telemetry.metrics import Metrics
from marserve.frontend.telemetry.model_metrics import ModelMetrics

_T = TypeVar("_T")
_SERVERS_OWN = ModelEnvironment()


@dataclass(frozen=True)
class Origin(ModelEntry):
    """How a model version was registered."""

    at_start: bool = False  # whether the server loaded it while it started
    source: str = REQUEST  # or a snapshot or catalog, which override all others
    workflow: str = ""  # of which it is a node; empty for none
    is_function: bool = False  # whether it is a function of a workflow's handler, with no archive


_NO_ORIGIN = Origin("")


class ModelVersion:
    """One version of a model; the manifest has its name, version and handler as registered."""

    #: Whether a request that was sent to a worker may be submitted again if it fails.
    repeats_requests: ClassVar[bool] = True
    _capacity_phrase: ClassVar[str] = "places to wait are taken"
    #: Seconds that workers may take for their last messages, after all requests are answered.
    _stop_seconds: ClassVar[float] = 0.0
    _pool_type: ClassVar[type[WorkerPool]] = WorkerPool
    _admission_type: ClassVar[type[Admission]] = Admission

    def __init__(
        self,
        archive: Archive,
        manifest: Manifest,
        settings: ModelSettings,
        host: WorkerHost,
        metrics: Metrics,
        environment: ModelEnvironment = _SERVERS_OWN,
        origin: Origin = _NO_ORIGIN,
    ) -> None:
        self.name = manifest.model_name
        self.version = manifest.model_version
        self.archive = archive
        self.manifest = manifest
        self.settings = settings
        self.origin = origin
        self.created = int(time.time())  # for OpenAI's clients
        self._host = host
        self._fullness = Fullness()
        self.queue = JobQueue(settings.batching.queue_size)
        batcher = Batcher(self.queue, settings.batching, asyncio.get_running_loop())
        self.metrics = ModelMetrics(metrics, self.name, self.version)
        served = ServedModel(manifest, archive.directory, settings, environment, archive.restore)
        self.workers = self._pool_type(
            served, host, batcher, self.metrics, lambda: self.admission.fail_queued()
        )
        self.lines = host.time_lines.of_model(self.name, self.version)
        self._pending = PendingRequests(
            batcher, self.metrics, self.lines, host.config.max_stream_backlog
        )
        self.admission = self._admission_type(settings, self.workers, self._pending)
        #: Its own admission, until a successor takes over.
        self._entrance: Admission | _HandedOver = self.admission

    @property
    def batcher(self) -> Batcher:
        """The batcher; of the several of a stateful model, which learn together, the first."""
        return self.workers.batchers[0]

    @property
    def tensors(self) -> Mapping[str, Any]:
        """The tensors declared in model-config.yaml, else by the handler (`backend.tensors`)."""
        return self.settings.tensors or next(
            (worker.results.tensors for worker in self.workers if worker.results.tensors), {}
        )

    @property
    def warnings(self) -> list[str]:
        """Warnings about model-config.yaml and the loads of the workers."""
        found = [*self.settings.warnings, *chain(*(each.results.warnings for each in self.workers))]
        if failure := self.workers.validation.failure:  # tolerated, else it is not served
            found.append(f"validateBatching: {failure}.")
        return list(dict.fromkeys(found))

    @property
    def queued(self) -> int:
        """Jobs that wait for a worker."""
        return len(self.queue)

    @property
    def free_capacity(self) -> int:
        """Jobs of normal priority that the queue can still accept."""
        return self.queue.free_capacity(Priority.NORMAL)

    @property
    def json_nan(self) -> str:
        """How NaN and infinities are written in answers in JSON (`backend.json_text`)."""
        return self._host.config.json_nan

    @property
    def max_rows(self) -> int:
        """The largest number of rows that a request may have."""
        return self.admission.max_rows

    @property
    def accepts(self) -> int:
        """Requests that it accepts now: those that idle workers take, and those of the queue."""
        if not self.workers.is_open:
            return 0
        idle = sum(each.workers.idle * each.size for each in self.workers.batchers)
        running = max(0, max(idle, self.workers.free_capacity) - self.queued)
        return running + (0 if self.settings.use_job_ticket else self.free_capacity)

    @property
    def pending(self) -> int:
        """Accepted and unanswered jobs, also those of long lists that are not queued yet."""
        return self._pending.jobs + self.admission.unqueued_rows

    @property
    def optimal_requests(self) -> int | None:
        """Requests in flight that give nearly all of the throughput now; None if unknown.

        At most ``num_requests``, which the clients keep in flight. OpenVINO calls it
        ``optimal_number_of_infer_requests``.
        """
        size = self.batcher.learning.size_that_pays
        if size is None:
            return None
        beyond_queue = max(0, self.workers.ready * size - self.queue.capacity)
        optimum = max(0, self.workers.to_saturate(size) - beyond_queue)
        return min(optimum, self.settings.batching.num_requests or optimum)

    @property
    def has_capacity(self) -> bool:
        """Whether its workers can process one more request without waiting for others."""
        return self.workers.free_capacity > len(self.queue)

    @property
    def expected_seconds(self) -> float:
        """Expected seconds until the answer of a request that arrives now."""
        return min(each.deadline_admission.expected_seconds() for each in self.workers.batchers)

    def why_full(self, share_in_flight: float) -> str:
        """Return why balancers should send new requests elsewhere; empty if they need not.

        ``share_in_flight`` is the used share of the balancer's limits of bytes in flight.
        """
        batching = self.settings.batching
        return self._fullness.reason(
            Use(self.admission.share_taken, f"Nearly all {self._capacity_phrase}."),
            Use(
                self.expected_seconds / batching.goal,
                f"An answer would take about as long as max_latency_ms={batching.goal * 1000:g}.",
            ),
            Use(share_in_flight, "Nearly as many bytes are in flight as are allowed."),
        )

    @property
    def device_type(self) -> str:
        """``gpu`` if its workers run on GPUs, else ``cpu``."""
        return "gpu" if self.settings.use_gpu and self._host.devices.count else "cpu"

    def check(self, request: PredictRequest) -> None:
        """Raise what `submit` would raise now; the input may still be incomplete."""
        self._entrance.check(request)

    def has_room(self, priority: Priority) -> bool:
        """Return whether this version could queue a request now; its successor is not asked."""
        return self.admission.has_room(priority)

    def submit(self, request: PredictRequest, on_answer: OnAnswer) -> Ticket:
        """Queue a request; ``on_answer`` is called once, after `submit` has returned.

        Raises:
            NoWorker: There is no worker, or the queue is full.
            Overloaded: Too much work is ahead of it.
            RequestExpired: Its deadline passed while it was received.
            ServeError: The model accepts no requests.
        """
        return self._entrance.submit(request, on_answer)

    def submit_all(self, request: PredictRequest, rows: Rows, on_answer: OnJointAnswer) -> Ticket:
        """Queue the rows of a request instead of its input; raises as `submit` does.

        They count as one request. Those of a long list are queued piece by piece. Also raises
        ListTooLong.
        """
        return self._entrance.submit_all(request, rows, on_answer)

    async def predict(
        self, request: PredictRequest, on_ticket: Callable[[Ticket], object] | None = None
    ) -> Prediction | Stream:
        """Queue a request and return its prediction, or a stream, which the caller closes.

        ``on_ticket`` is called with the ticket. Raises the ServeError that is the answer.
        """
        return await _answer_to(partial(self.submit, request), on_ticket)

    async def predict_all(
        self,
        request: PredictRequest,
        rows: Sequence[Input],
        on_ticket: Callable[[Ticket], object] | None = None,
    ) -> list[Prediction]:
        """Queue the rows of a request; return or raise their `JointAnswer`."""
        made = await request.memory.run(jobs_of(request, rows))
        return await _answer_to(partial(self.submit_all, request, made), on_ticket)

    def has_sequence(self, sequence_id: str) -> bool:
        """Return whether the version has such a sequence."""
        del sequence_id
        return False

    def leave_sequence(self, sequence_id: str) -> None:
        """End a sequence whose client has left, for transports that detect that."""

    def reconfigure(self, settings: ModelSettings) -> None:
        """Apply new settings, from the next batch on."""
        self.settings = self.admission.settings = settings
        self.workers.reconfigure(settings)

    def hand_over(self, successor: "ModelVersion") -> None:
        """Make a successor serve the requests that are submitted to this version from now on.

        A transport finds a model before it reads a body, and the model may be unregistered
        meanwhile. A request that names this version goes to a successor of the same version only.
        """
        self._entrance = _HandedOver(self, self.admission, successor)

    async def close(self, drain: float) -> None:
        """Drain, stop the workers, and fail the requests that are still waiting."""
        await self.admission.drain(drain)
        await self.workers.close(self._stop_seconds)
        self.admission.fail_queued()
        self.metrics.close()
        self.lines.close()


@dataclass(frozen=True)
class _HandedOver:
    """Forwards requests to the successor of a version; replaces its `Admission`."""

    model: ModelVersion
    admission: Admission
    successor: ModelVersion

    def check(self, request: PredictRequest) -> None:
        self._next(request).check(request)

    def submit(self, request: PredictRequest, on_answer: OnAnswer) -> Ticket:
        return self._next(request).submit(request, on_answer)

    def submit_all(self, request: PredictRequest, rows: Rows, on_answer: OnJointAnswer) -> Ticket:
        return self._next(request).submit_all(request, rows, on_answer)

    def _next(self, request: PredictRequest) -> "ModelVersion | Admission":
        is_accepted = not request.by_version or self.successor.version == self.model.version
        return self.successor if is_accepted else self.admission


async def _answer_to(
    submit: Callable[[Callable[[_T | ServeError], None]], Ticket],
    on_ticket: Callable[[Ticket], object] | None = None,
) -> _T:
    """Submit and return the answer; raises it if it is a ServeError."""
    answered: asyncio.Future[_T | ServeError] = asyncio.get_running_loop().create_future()

    def on_answer(answer: _T | ServeError) -> None:
        if not answered.done():  # it is, if the caller was cancelled just now
            answered.set_result(answer)

    ticket = submit(on_answer)
    if on_ticket is not None:
        on_ticket(ticket)
    try:
        answer = await answered
    except BaseException:
        ticket.cancel()
        raise
    if isinstance(answer, ServeError):
        try:
            raise answer.with_traceback(None)  # the jobs of a batch share the error
        finally:
            # Otherwise the error keeps the body in memory, in a cycle.
            del answer, answered
    return answer
