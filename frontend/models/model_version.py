"""One version of a model: its queue, its batcher, its workers, and the way in for its requests."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from marserve.backend.manifest import Manifest
from marserve.backend.protocol import Prediction
from marserve.frontend.batching.batcher import Batcher
from marserve.frontend.batching.job_queue import JobQueue
from marserve.frontend.batching.jobs import OnAnswer, Stream
from marserve.frontend.errors import NoWorker, ServeError
from marserve.frontend.models.admission import Admission
from marserve.frontend.models.archives.archive import Archive
from marserve.frontend.models.archives.requirements import ModelEnvironment
from marserve.frontend.models.host import ServedModel, WorkerHost
from marserve.frontend.models.predict_request import (
    OnJointAnswer,
    PendingRequests,
    PredictRequest,
    Ticket,
)
from marserve.frontend.models.settings.model_settings import ModelSettings
from marserve.frontend.models.worker_pool import WorkerPool
from marserve.frontend.telemetry.metrics import Metrics
from marserve.frontend.telemetry.model_metrics import ModelMetrics

_T = TypeVar("_T")
_SERVERS_OWN = ModelEnvironment()


class ModelVersion:
    """One version of a model; the manifest has its name, version and handler as registered."""

    def __init__(
        self,
        archive: Archive,
        manifest: Manifest,
        settings: ModelSettings,
        host: WorkerHost,
        metrics: Metrics,
        environment: ModelEnvironment = _SERVERS_OWN,
    ) -> None:
        self.name = manifest.model_name
        self.version = manifest.model_version
        self.archive = archive
        self.manifest = manifest
        self.settings = settings
        self.loaded_at_start = False
        #: The handler that the registration chose over the archive's; empty for none.
        self.chosen_handler = ""
        self._host = host
        self.queue = JobQueue(settings.batching.queue_size)
        self.batcher = Batcher(self.queue, settings.batching, asyncio.get_running_loop())
        self._metrics = ModelMetrics(metrics, self.name, self.version)
        served = ServedModel(manifest, archive.directory, settings, environment)
        self.workers = WorkerPool(
            served, host, self.batcher, self._metrics, lambda: self._admission.fail_queued()
        )
        self._pending = PendingRequests(
            self.queue, self.batcher, self._metrics, host.config.max_stream_backlog
        )
        self._admission = Admission(settings, self.workers, self._pending)

    @property
    def pending(self) -> int:
        """Jobs accepted and not answered yet."""
        return self._pending.jobs

    @property
    def device_type(self) -> str:
        """``gpu`` when its workers run on GPUs, else ``cpu``."""
        return "gpu" if self.settings.use_gpu and self._host.devices.count else "cpu"

    def submit(self, request: PredictRequest, on_answer: OnAnswer) -> Ticket:
        """Queue a request; `predict_request` says how it is answered.

        Raises:
            NoWorker: No worker, or no seat in the queue.
            Overloaded: It could not be answered in time.
            RequestExpired: Its time was over when it had been read.
            ServeError: The model takes no requests.
        """
        return self._admission.submit(request, on_answer)

    def submit_all(self, requests: Sequence[PredictRequest], on_answer: OnJointAnswer) -> Ticket:
        """Queue requests that belong together, all or none; raises as `submit` does.

        There is at least one, they differ in nothing but their inputs, and count as one. The first
        in order that fails or has a status other than 200 ends the matter for all.
        """
        return self._admission.submit_all(requests, on_answer)

    async def predict(self, request: PredictRequest) -> Prediction | Stream:
        """Queue a request and wait for its prediction, or for the stream, which the caller closes.

        Raises:
            ServeError: What became of the request instead.
        """
        return await _answer_to(partial(self.submit, request))

    async def predict_all(self, requests: Sequence[PredictRequest]) -> list[Prediction]:
        """Queue requests that belong together and wait for their answer, see `JointAnswer`.

        Raises:
            ServeError: What became of the first that was not answered.
        """
        return await _answer_to(partial(self.submit_all, requests))

    def reconfigure(self, settings: ModelSettings) -> None:
        """Have requests become batches otherwise, from the next batch on."""
        self.settings = self._admission.settings = settings
        self.workers.reconfigure(settings)
        self.batcher.reconfigure(settings.batching)

    def refuse(self, refusal: ServeError | None) -> None:
        """Take no more requests from now on; with None take them again."""
        self._admission.refusal = refusal

    def no_worker(self) -> NoWorker:
        """The refusal of a model that nobody serves."""
        return self._admission.no_worker()

    async def drain(self, timeout: float) -> None:
        """Wait until every accepted request is answered; see `Admission.drain`."""
        await self._admission.drain(timeout)

    async def close(self, drain: float) -> None:
        """End its workers after draining, answer whoever is still waiting."""
        await self.drain(drain)
        await self.workers.close(drain=0)
        self._admission.fail_queued()
        self._metrics.close()


async def _answer_to(submit: Callable[[Callable[[_T | ServeError], None]], Ticket]) -> _T:
    """Submit something and wait for its answer; raises it if it is a ServeError."""
    answered: asyncio.Future[_T | ServeError] = asyncio.get_running_loop().create_future()

    def on_answer(answer: _T | ServeError) -> None:
        if not answered.done():  # cancelled a moment ago
            answered.set_result(answer)

    ticket = submit(on_answer)
    try:
        answer = await answered
    except BaseException:
        ticket.cancel()
        raise
    if isinstance(answer, ServeError):
        raise answer
    return answer
