"""The models that are served: versions, the default among them, and the way in for a request.

Only `ModelManager` changes the register; the doors look models up and hand requests to them.
"""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

from marserve.backend.manifest import Manifest
from marserve.backend.protocol import Buffer, Input
from marserve.frontend.batching.batcher import Batcher
from marserve.frontend.batching.jobs import Answered, Group, Job, JobQueue
from marserve.frontend.batching.policies import FixedWindow
from marserve.frontend.batching.streams import Stream
from marserve.frontend.errors import (
    DefaultVersionInUse,
    ModelNotFound,
    NoWorker,
    RequestExpired,
    ServeError,
    VersionConflict,
    VersionNotFound,
)
from marserve.frontend.models.archive import Archive
from marserve.frontend.models.dependencies import ModelEnvironment
from marserve.frontend.models.host import ServedModel, WorkerHost
from marserve.frontend.models.pool import WorkerPool
from marserve.frontend.models.settings import ModelSettings
from marserve.frontend.telemetry.metrics import Metrics, RequestCounters

_SERVERS_OWN = ModelEnvironment()


class ModelVersion:
    """One version of a model: its queue, its batcher and its workers.

    Args:
        archive: Where it came from and where it lies.
        manifest: As it is registered: name, version and handler are settled.
        settings: Its numbers.
        host: What its workers share with others.
        metrics: Where it is counted.
        environment: What its workers run in.
    """

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
        self._loop = asyncio.get_running_loop()
        self.queue = JobQueue(settings.job_queue_size)
        # A full queue closes a batch too: nobody else could join it.
        self._size = min(settings.batch_size, settings.job_queue_size)
        policy = FixedWindow(self._size, settings.max_batch_delay)
        self._batcher = Batcher(self.queue, policy, self._loop)
        self._metrics = metrics.for_model(self.name, self.version)
        self.workers = WorkerPool(
            ServedModel(
                self.name,
                self.version,
                archive.directory,
                manifest.handler,
                manifest.envelope,
                settings,
                environment,
            ),
            host,
            self._batcher,
            self._metrics,
            on_last_gone=self._strand,
        )
        #: Requests accepted and not answered yet.
        self.pending = 0
        self._empty = asyncio.Event()
        self._empty.set()
        self._refusal: ServeError | None = None

    async def predict(self, input_: Input, arrived: float, *, by_version: bool) -> Answered:
        """Queue a request and wait for its prediction, or for the first piece of it.

        Args:
            input_: What the client sent.
            arrived: Moment of arrival, on the monotonic clock.
            by_version: Whether the client named the version.

        Returns:
            The prediction; or the stream of its pieces, which the caller closes.

        Raises:
            NoWorker: No worker, or no seat in the queue.
            ServeError: What became of it instead.
        """
        if not self._admits():
            raise self._refusal or self.no_worker(by_version=by_version)
        counters = self._metrics.versioned if by_version else self._metrics.unversioned
        counters.accepted()
        # In line from now on, though it arrived when its first byte did: a slow upload is no wait.
        queued = time.monotonic()
        group = Group.EXPLAIN if input_.headers.get("explain") == "True" else Group.PREDICT
        job = Job(input_, queued, self._loop.create_future(), group)
        self._enter(job, arrived)
        try:
            answer = await job.future
        except BaseException:
            self._give_up(job)
            raise
        if type(answer) is Stream:
            answer.most_waiting = self._host.config.max_stream_backlog
            answer.on_close = partial(self._stream_closed, job, counters, arrived)
        else:
            self._leave(job)
            assert job.dispatched is not None
            counters.answered(job.dispatched - queued, time.monotonic() - arrived)
        return answer

    async def describe_itself(self, question: Input) -> Buffer:
        """What the handler says about its model, as it would be sent: the customized description.

        Args:
            question: A request whose headers have the handler describe its model.

        Raises:
            NoWorker: No worker, or no seat in the queue.
            ServeError: What became of the question instead.
        """
        if not self._admits():
            raise self._refusal or NoWorker(
                f'Model "{self.name}" has no worker to serve describe request. Please use scale '
                "workers API to add workers."
            )
        now = time.monotonic()
        question.parts = []
        job = Job(question, now, self._loop.create_future(), Group.DESCRIBE)
        self._enter(job, now)
        # A worker of asynchronous handlers may have no deadline of its own.
        expired = RequestExpired("The handler did not describe its model within responseTimeout.")
        timer = self._loop.call_later(self.settings.response_timeout, job.fail, expired)
        try:
            answer = await job.future
        finally:
            timer.cancel()
            self._give_up(job)
        if isinstance(answer, Stream):  # no description is that long
            return b""
        if answer.status != 200:
            raise ServeError("The handler could not describe its model.", status=answer.status)
        return answer.body

    @property
    def device_type(self) -> str:
        """``gpu`` when its workers run on GPUs, else ``cpu``."""
        return "gpu" if self.settings.use_gpu and self._host.devices.count else "cpu"

    def refuse(self, refusal: ServeError | None) -> None:
        """Take no more requests from now on; with None take them again."""
        self._refusal = refusal

    def no_worker(self, *, by_version: bool = False) -> NoWorker:
        """The refusal of a model nobody serves."""
        return NoWorker(self._no_worker_message(by_version))

    async def drain(self, timeout: float) -> None:
        """Wait until every accepted request is answered; at most ``timeout`` seconds.

        Without a worker that is ready nothing can be waited for.
        """
        if self.pending and self.workers.is_working and timeout > 0:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._empty.wait(), timeout)

    async def close(self, drain: float) -> None:
        """End its workers after draining, answer whoever is still waiting."""
        await self.drain(drain)
        await self.workers.close(drain=0)
        self._strand()
        self._metrics.close()

    def _admits(self) -> bool:
        """Whether a request may join the queue now."""
        if self._refusal is not None:
            return False
        has_ticket = not self.settings.use_job_ticket or self._has_ticket
        if self.workers.alive and not self.queue.is_full and has_ticket:
            return True
        self._metrics.rejected("queue_full" if self.workers.alive else "no_worker")
        return False

    @property
    def _has_ticket(self) -> bool:
        """Whether a worker waits for a request: each has as many tickets as its batch has seats.

        TorchServe gave one for each worker, so that batches never filled. Where requests join a
        batch on its way, a seat is free until somebody sits on it.
        """
        if self.settings.continuous_batching:
            return self.pending < self.workers.ready * self._size
        return len(self.queue) < self._batcher.idle * self._size

    def _enter(self, job: Job, arrived: float) -> None:
        """Queue a job that was admitted."""
        if self.settings.client_timeout:  # a timer for each request, only where it was asked for
            left = arrived + self.settings.client_timeout - time.monotonic()
            timer = self._loop.call_later(max(0.0, left), self._expire, job)
            # The first piece of an answer is in time; how long the rest takes is not asked.
            job.future.add_done_callback(lambda _: timer.cancel())
        self.pending += 1
        self._empty.clear()
        self._batcher.put(job)

    def _give_up(self, job: Job) -> None:
        """Nobody waits any more, not even for what comes behind a first piece."""
        if job.stream is not None:
            job.stream.close()
        self._leave(job)

    def _stream_closed(
        self, job: Job, counters: RequestCounters, arrived: float, complete: bool
    ) -> None:
        self._leave(job)
        if complete and job.dispatched is not None:
            counters.answered(job.dispatched - job.arrived, time.monotonic() - arrived)

    def _leave(self, job: Job) -> None:
        if job.dispatched is None:
            self.queue.discard(job)
            self._metrics.rejected(_why_unserved(job))
        self.pending -= 1
        if not self.pending:
            self._empty.set()

    def _expire(self, job: Job) -> None:
        timeout_ms = round(self.settings.client_timeout * 1000)
        job.fail(RequestExpired(f"No prediction within clientTimeoutInMills={timeout_ms}."))

    def _strand(self) -> None:
        """Nobody is left to serve those in the queue."""
        for job in self.queue.clear():
            job.fail(self._refusal or self.no_worker())

    def _no_worker_message(self, by_version: bool) -> str:
        # The stray quote is TorchServe's; clients compare the text.
        version = f' Version {self.version}"' if by_version else ""
        return (
            f'Model "{self.name}"{version} has no worker to serve inference request. Please use '
            "scale workers API to add workers. If this is a sequence inference, please check if "
            "it is closed, or expired; or exceeds maxSequenceJobQueueSize"
        )


def _why_unserved(job: Job) -> str:
    if job.future.cancelled():
        return "client_gone"
    return "expired" if isinstance(job.future.exception(), RequestExpired) else "no_worker"


@dataclass
class _Versions:
    default: str
    by_version: dict[str, ModelVersion] = field(default_factory=dict)


class ModelRegistry:
    """All models by name and version. The first version of a name becomes its default."""

    def __init__(self) -> None:
        self._models: dict[str, _Versions] = {}

    def __iter__(self) -> Iterator[ModelVersion]:
        for versions in self._models.values():
            yield from versions.by_version.values()

    def defaults(self) -> list[ModelVersion]:
        """The default version of every model, sorted by name."""
        return [
            versions.by_version[versions.default] for _, versions in sorted(self._models.items())
        ]

    def find(self, name: str, version: str | None = None) -> ModelVersion:
        """The version asked for, or the default.

        Raises:
            ModelNotFound, VersionNotFound: There is none.
        """
        versions = self._find(name)
        model = versions.by_version.get(versions.default if version is None else version)
        if model is None:
            raise VersionNotFound(f"Model version: {version} does not exist for model: {name}")
        return model

    def versions(self, name: str) -> list[ModelVersion]:
        """All versions of a model, sorted by version text.

        Raises:
            ModelNotFound: There is no such model.
        """
        return [model for _, model in sorted(self._find(name).by_version.items())]

    def add(self, model: ModelVersion) -> None:
        """Make a version visible.

        Raises:
            VersionConflict: It is there already.
        """
        versions = self._models.setdefault(model.name, _Versions(model.version))
        if model.version in versions.by_version:
            raise VersionConflict(
                f"Model version {model.version} is already registered for model {model.name}"
            )
        versions.by_version[model.version] = model

    def remove(self, model: ModelVersion) -> None:
        """Make a version invisible; nothing if it is not there.

        Raises:
            DefaultVersionInUse: It is the default and others exist.
        """
        versions = self._models.get(model.name)
        if versions is None or versions.by_version.get(model.version) is not model:
            return
        if versions.default == model.version and len(versions.by_version) > 1:
            raise DefaultVersionInUse(f"Cannot remove default version for model {model.name}")
        del versions.by_version[model.version]
        if not versions.by_version:
            del self._models[model.name]

    def set_default(self, name: str, version: str) -> None:
        """Choose the version that answers where none is named.

        Raises:
            ModelNotFound, VersionNotFound: There is none.
        """
        versions = self._find(name)
        if version not in versions.by_version:
            raise VersionNotFound(f"Model version {version} does not exist for model {name}")
        versions.default = version

    def _find(self, name: str) -> _Versions:
        versions = self._models.get(name)
        if versions is None:
            raise ModelNotFound(f"Model not found: {name}")
        return versions
