"""One version of a model: its queue, batcher and workers, and `submit`, where requests enter."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypeVar

from marserve.backend.manifest import Manifest
from marserve.backend.protocol import Prediction
from marserve.frontend.archives.archive import Archive
from marserve.frontend.archives.requirements import ModelEnvironment
from marserve.frontend.batching.batcher import Batcher
from marserve.frontend.batching.job_queue import JobQueue
from marserve.frontend.batching.jobs import OnAnswer, Priority, Stream
from marserve.frontend.errors import NoWorker, ServeError
from marserve.frontend.serving.admission import Admission
from marserve.frontend.serving.fullness import Fullness, Use
from marserve.frontend.serving.host import ServedModel, WorkerHost
from marserve.frontend.serving.predict_request import (
    OnJointAnswer,
    PendingRequests,
    PredictRequest,
    Ticket,
)
from marserve.frontend.serving.worker_pool import WorkerPool
from marserve.frontend.settings.model_settings import ModelSettings
from marserve.frontend.telemetry.metrics import Metrics
from marserve.frontend.telemetry.model_metrics import ModelMetrics

_T = TypeVar("_T")
_SERVERS_OWN = ModelEnvironment()


@dataclass(frozen=True)
class Origin:
    """How a model version came to be registered.

    Attributes:
        at_start: Whether the server loaded it while it started.
        handler: Handler that the registration named instead of the archive's; empty for none.
        workflow: Workflow of which it is a node; empty for none.
        is_function: Whether it is a function of a workflow's handler, without an archive.
    """

    at_start: bool = False
    handler: str = ""
    workflow: str = ""
    is_function: bool = False


_NO_ORIGIN = Origin()


class ModelVersion:
    """One version of a model; the manifest has its name, version and handler as registered."""

    #: Whether a request that was sent to a worker may be submitted again if it fails.
    repeats_requests: ClassVar[bool] = True
    _capacity_phrase: ClassVar[str] = "places to wait are taken"
    #: Seconds that workers may take for their last messages, after all requests are answered.
    _stop_seconds: ClassVar[float] = 0.0

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
        self._host = host
        self._fullness = Fullness()
        self.queue = JobQueue(settings.batching.queue_size)
        batcher = Batcher(self.queue, settings.batching, asyncio.get_running_loop())
        self.metrics = ModelMetrics(metrics, self.name, self.version)
        served = ServedModel(manifest, archive.directory, settings, environment)
        self.workers = self._make_workers(served, batcher)
        self._pending = PendingRequests(
            self.queue, batcher, self.metrics, host.config.max_stream_backlog
        )
        self._admission = self._make_admission()
        #: Where requests enter: its own admission, until others take over.
        self._entrance: Admission | _HandedOver = self._admission

    @property
    def batcher(self) -> Batcher:
        """What forms its batches; of the several of a stateful model any, they learn together."""
        return self.workers.batchers[0]

    @property
    def tensors(self) -> Mapping[str, Any]:
        """The tensors declared in model-config.yaml, else by the handler; see `backend.tensors`."""
        return self.settings.tensors or next(
            (worker.declared_tensors for worker in self.workers if worker.declared_tensors), {}
        )

    @property
    def queued(self) -> int:
        """Jobs that wait for a worker."""
        return len(self.queue)

    @property
    def free_capacity(self) -> int:
        """How many more jobs of normal priority may wait."""
        return self.queue.free_seats(Priority.NORMAL)

    @property
    def pending(self) -> int:
        """Jobs accepted and not answered yet."""
        return self._pending.jobs

    @property
    def optimal_requests(self) -> int | None:
        """How many requests in flight give nearly all of the throughput, now; None if unknown.

        More only wait. (OpenVINO's ``optimal_number_of_infer_requests``.)
        """
        batcher = self.batcher
        size = batcher.sizing.size_that_pays(batcher.size)
        if size is None:
            return None
        without_seat = max(0, self.workers.ready * size - self.queue.capacity)
        return max(0, self.workers.to_saturate(size) - without_seat)

    @property
    def has_room(self) -> bool:
        """Whether its workers take one more request without waiting for others, as far as known."""
        return self.workers.room > len(self.queue)

    @property
    def expected_seconds(self) -> float:
        """How long a request that came now would take to be answered, as far as is known."""
        return min(each.deadlines.expected_seconds() for each in self.workers.batchers)

    def why_full(self, share_in_flight: float) -> str:
        """Why balancers should send new requests elsewhere; empty while they need not.

        ``share_in_flight`` is that of the bytes in flight that the balancer may use.
        """
        batching = self.settings.batching
        return self._fullness.reason(
            Use(self._admission.share_taken, f"Nearly all {self._capacity_phrase}."),
            Use(
                self.expected_seconds / batching.goal,
                f"An answer would take about as long as max_latency_ms={batching.goal * 1000:g}.",
            ),
            Use(share_in_flight, "Nearly as many bytes are in flight as are allowed."),
        )

    @property
    def device_type(self) -> str:
        """``gpu`` when its workers run on GPUs, else ``cpu``."""
        return "gpu" if self.settings.use_gpu and self._host.devices.count else "cpu"

    def check(self, request: PredictRequest) -> None:
        """Raise what `submit` would raise now; its input need not be read yet."""
        self._entrance.check(request)

    def submit(self, request: PredictRequest, on_answer: OnAnswer) -> Ticket:
        """Queue a request; `predict_request` says how it is answered.

        Raises:
            NoWorker: There is no worker, or the queue is full.
            Overloaded: It could not be answered in time.
            RequestExpired: Its deadline had passed when it had been read.
            ServeError: The model accepts no requests.
        """
        return self._entrance.submit(request, on_answer)

    def submit_all(self, requests: Sequence[PredictRequest], on_answer: OnJointAnswer) -> Ticket:
        """Queue requests that belong together, all or none; raises as `submit` does.

        ``requests`` is not empty; they differ only in their inputs and count as one request. The
        first in order that fails, or has a status other than 200, decides the answer.
        """
        return self._entrance.submit_all(requests, on_answer)

    async def predict(
        self, request: PredictRequest, on_ticket: Callable[[Ticket], object] | None = None
    ) -> Prediction | Stream:
        """Queue a request and wait for its prediction, or for the stream, which the caller closes.

        ``on_ticket`` gets the ticket, for those who want to know when it was sent to a worker.

        Raises:
            ServeError: The request was refused or failed.
        """
        return await _answer_to(partial(self.submit, request), on_ticket)

    async def predict_all(
        self,
        requests: Sequence[PredictRequest],
        on_ticket: Callable[[Ticket], object] | None = None,
    ) -> list[Prediction]:
        """Queue requests that belong together and wait for their answer, see `JointAnswer`.

        ``on_ticket`` is as of `predict`.

        Raises:
            ServeError: The first failure.
        """
        return await _answer_to(partial(self.submit_all, requests), on_ticket)

    def has_sequence(self, sequence_id: str) -> bool:
        """Return whether the version has such a sequence."""
        del sequence_id
        return False

    def leave_sequence(self, sequence_id: str) -> None:
        """End a sequence whose client has left, for transports that detect that."""

    def reconfigure(self, settings: ModelSettings) -> None:
        """Apply new settings, from the next batch on."""
        self.settings = self._admission.settings = settings
        self.workers.reconfigure(settings)

    def refuse(self, refusal: ServeError | None) -> None:
        """Refuse all requests with this error from now on; None accepts them again."""
        self._admission.refusal = refusal

    def hand_over(self, successor: "ModelVersion") -> None:
        """Have a successor serve the requests that found this version and come in only now.

        A body takes its time to be read; meanwhile another version may have become the default, and
        this one may have been unregistered. Who has named a version is refused all the same, unless
        the successor is of that version.
        """
        self._entrance = _HandedOver(self, self._admission, successor)

    def no_worker(self) -> NoWorker:
        """The error for a request to a model without a working worker."""
        return self._admission.no_worker()

    async def drain(self, timeout: float) -> None:
        """Wait until every accepted request is answered; see `Admission.drain`."""
        await self._admission.drain(timeout)

    async def close(self, drain: float) -> None:
        """Drain, stop the workers, and fail the requests that are still waiting."""
        await self.drain(drain)
        await self.workers.close(self._stop_seconds)
        self._admission.fail_queued()
        self.metrics.close()

    def _make_workers(self, model: ServedModel, batcher: Batcher) -> WorkerPool:
        return WorkerPool(model, self._host, batcher, self.metrics, self._fail_queued)

    def _make_admission(self) -> Admission:
        return Admission(self.settings, self.workers, self._pending)

    def _fail_queued(self) -> None:
        self._admission.fail_queued()


@dataclass(frozen=True)
class _HandedOver:
    """Leads requests to the successor of a version; in the place of its `Admission`."""

    model: ModelVersion
    admission: Admission
    successor: ModelVersion

    def check(self, request: PredictRequest) -> None:
        self._next(request).check(request)

    def submit(self, request: PredictRequest, on_answer: OnAnswer) -> Ticket:
        return self._next(request).submit(request, on_answer)

    def submit_all(self, requests: Sequence[PredictRequest], on_answer: OnJointAnswer) -> Ticket:
        return self._next(requests[0]).submit_all(requests, on_answer)

    def _next(self, request: PredictRequest) -> "ModelVersion | Admission":
        is_meant = not request.by_version or self.successor.version == self.model.version
        return self.successor if is_meant else self.admission


async def _answer_to(
    submit: Callable[[Callable[[_T | ServeError], None]], Ticket],
    on_ticket: Callable[[Ticket], object] | None = None,
) -> _T:
    """Submit and wait for the answer; raises the answer if it is a ServeError."""
    answered: asyncio.Future[_T | ServeError] = asyncio.get_running_loop().create_future()

    def on_answer(answer: _T | ServeError) -> None:
        if not answered.done():  # cancelled a moment ago
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
            raise answer.with_traceback(None)  # other jobs of the batch have the same error
        finally:
            del answer, answered  # an error in a cycle with its traceback keeps the body in memory
    return answer
