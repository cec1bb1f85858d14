"""The models that are served: versions, the default among them, and the way in for a request.

Only `ModelManager` changes the register; the doors look models up and hand requests to them.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from marserve.backend.manifest import Manifest
from marserve.backend.protocol import Buffer, Input
from marserve.frontend.batching.batcher import Batcher
from marserve.frontend.batching.jobs import Addressee, Answered, Group, Job, JobQueue, Priority
from marserve.frontend.batching.streams import Stream
from marserve.frontend.errors import (
    DefaultVersionInUse,
    ModelNotFound,
    NoWorker,
    Overloaded,
    RequestExpired,
    ServeError,
    VersionConflict,
    VersionNotFound,
    WorkerDied,
)
from marserve.frontend.models.archives.archive import Archive
from marserve.frontend.models.archives.requirements import ModelEnvironment
from marserve.frontend.models.failed_loads import FailedLoads
from marserve.frontend.models.host import ServedModel, WorkerHost
from marserve.frontend.models.settings.model_settings import ModelSettings
from marserve.frontend.models.worker_pool import WorkerPool
from marserve.frontend.telemetry.metrics import Metrics, RequestCounters

_SERVERS_OWN = ModelEnvironment()


@dataclass(frozen=True)
class RequestOptions:
    """How soon a client wants its answer.

    Attributes:
        timeout: Seconds from the arrival of the request; infinite for as long as it takes.
        priority: Its class.
    """

    timeout: float = math.inf
    priority: Priority = Priority.NORMAL


NO_OPTIONS = RequestOptions()


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
        self.queue = JobQueue(settings.batching.queue_size)
        self.batcher = Batcher(self.queue, settings.batching, self._loop)
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
            self.batcher,
            self._metrics,
            on_closed=self._strand,
        )
        #: Requests accepted and not answered yet.
        self.pending = 0
        self._empty = asyncio.Event()
        self._empty.set()
        self._refusal: ServeError | None = None

    async def predict(
        self,
        input_: Input,
        arrived: float,
        *,
        by_version: bool,
        wish: RequestOptions = NO_OPTIONS,
    ) -> Answered:
        """Queue a request and wait for its prediction, or for the first piece of it.

        Args:
            input_: What the client sent.
            arrived: Moment of arrival, on the monotonic clock.
            by_version: Whether the client named the version.
            wish: How soon the client wants it.

        Returns:
            The prediction; or the stream of its pieces, which the caller closes.

        Raises:
            NoWorker: No worker, or no seat in the queue.
            Overloaded: It could not be answered in time.
            RequestExpired: It was not.
            ServeError: What became of it instead.
        """
        future: asyncio.Future[Answered] = self._loop.create_future()
        # In line from now on, though it arrived when its first byte did: a slow upload is no wait.
        queued = time.monotonic()
        admission = self.admit(input_, arrived, queued, future, by_version=by_version, wish=wish)
        try:
            answer = await future
        except BaseException:
            admission.give_up()
            raise
        admission.answered(answer)
        return answer

    def admit(
        self,
        input_: Input,
        arrived: float,
        queued: float,
        addressee: Addressee,
        *,
        by_version: bool,
        wish: RequestOptions = NO_OPTIONS,
    ) -> "Admission":
        """Queue a request for somebody who is told its answer.

        Args:
            input_: What the client sent.
            arrived: Moment of arrival, on the monotonic clock.
            queued: The present moment, on the same clock.
            addressee: Gets the answer, perhaps before this returns. Then, or when nobody waits any
                more, it has to tell the admission.
            by_version: Whether the client named the version.
            wish: How soon the client wants it.

        Raises:
            NoWorker, Overloaded, RequestExpired: See `predict`.
        """
        if not self._admits(wish.priority):
            raise self._refusal or self.no_worker(by_version=by_version)
        counters = self._metrics.versioned if by_version else self._metrics.unversioned
        job = Job(input_, queued, addressee, _group_of(input_), priority=wish.priority)
        timer = self._enter(job, arrived, wish.timeout)
        counters.accepted()
        return Admission(self, job, counters, arrived, timer)

    @contextlib.contextmanager
    def rows(
        self,
        inputs: Sequence[Input],
        arrived: float,
        *,
        by_version: bool,
        wish: RequestOptions = NO_OPTIONS,
    ) -> Iterator[Sequence[asyncio.Future[Answered]]]:
        """Queue the rows of one request, all or none; outside the block nobody waits for them.

        It counts as one request, however many rows it has; a row is what batches are made of.

        Args:
            inputs: The rows, at least one.
            arrived: See `predict`.
            by_version: See `predict`.
            wish: See `predict`.

        Yields:
            The future answer of each row; to be awaited in this order.

        Raises:
            NoWorker: No worker, or not a seat in the queue for each row.
            RequestExpired: Their time was over when they had been read.
            Overloaded: Not all of them could be answered in time.
        """
        if not self._admits(wish.priority, len(inputs)):
            raise self._refusal or self._no_room(wish.priority, len(inputs), by_version=by_version)
        counters = self._metrics.versioned if by_version else self._metrics.unversioned
        queued = time.monotonic()
        group = _group_of(inputs[0])
        futures: list[asyncio.Future[Answered]] = [self._loop.create_future() for _ in inputs]
        jobs = [
            Job(one, queued, future, group, priority=wish.priority)
            for one, future in zip(inputs, futures, strict=True)
        ]
        timer = self._enter_together(jobs, arrived, wish.timeout)
        counters.accepted()
        try:
            yield futures
            waited = max(job.dispatched or queued for job in jobs) - queued
            counters.answered(waited, time.monotonic() - arrived)
        finally:
            if timer is not None:
                timer.cancel()
            for future in futures:
                future.cancel()  # also asyncio's way to say that nobody will look at a failure
            self._leave_together(jobs)

    async def describe_itself(self, question: Input) -> Buffer:
        """What the handler says about its model, as it would be sent: the customized description.

        Args:
            question: A request whose headers have the handler describe its model.

        Raises:
            NoWorker: No worker, or no seat in the queue.
            ServeError: What became of the question instead.
        """
        if not self._admits(Priority.NORMAL):
            raise self._refusal or NoWorker(
                f'Model "{self.name}" has no worker to serve describe request. Please use scale '
                f"workers API to add workers{self._why_no_worker() or '.'}"
            )
        now = time.monotonic()
        question.parts = []
        future: asyncio.Future[Answered] = self._loop.create_future()
        job = Job(question, now, future, Group.DESCRIBE)
        self._enter(job, now)
        # A worker of asynchronous handlers may have no deadline of its own.
        expired = RequestExpired("The handler did not describe its model within responseTimeout.")
        timer = self._loop.call_later(self.settings.response_timeout, job.fail, expired)
        try:
            answer = await future
        finally:
            timer.cancel()
            if job.stream is not None:
                job.stream.close()
            self.leave(job)
        if isinstance(answer, Stream):  # no description is that long
            return b""
        if answer.status != 200:
            raise ServeError("The handler could not describe its model.", status=answer.status)
        return answer.body

    @property
    def most_stream_backlog(self) -> int:
        """How much of a streamed answer may wait for a slow client; see `Stream`."""
        return self._host.config.max_stream_backlog

    @property
    def device_type(self) -> str:
        """``gpu`` when its workers run on GPUs, else ``cpu``."""
        return "gpu" if self.settings.use_gpu and self._host.devices.count else "cpu"

    def reconfigure(self, settings: ModelSettings) -> None:
        """Have requests become batches otherwise, from the next batch on."""
        self.settings = settings
        self.workers.reconfigure(settings)
        self.batcher.reconfigure(settings.batching)

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

    def _admits(self, priority: Priority, rows: int = 1) -> bool:
        """Whether a request may join the queue now."""
        if self._refusal is not None:
            return False
        has_tickets = not self.settings.use_job_ticket or self._has_tickets(rows)
        if self.workers.is_open and self.queue.has_seat(priority, rows) and has_tickets:
            return True
        self._metrics.rejected("queue_full" if self.workers.is_open else "no_worker")
        return False

    def _has_tickets(self, rows: int) -> bool:
        """Whether a worker waits for a request: each has as many tickets as its batch has seats.

        TorchServe gave one for each worker, so that batches never filled. Where requests join a
        batch on its way, a seat is free until somebody sits on it.
        """
        if self.settings.continuous_batching:
            return self.pending + rows <= self.workers.ready * self.batcher.size
        return len(self.queue) + rows <= self.batcher.idle * self.batcher.size

    def _enter(
        self, job: Job, arrived: float, timeout: float = math.inf
    ) -> asyncio.TimerHandle | None:
        """Queue a job that found a seat; returns what rings when its time is over.

        Raises:
            RequestExpired: Its time was over when it had been read.
            Overloaded: It could not be answered in time.
        """
        timeout = self._time_for(job, arrived, timeout)
        job.deadline = arrived + timeout
        try:
            self.batcher.admit(job)
        except Overloaded:
            self._metrics.rejected("overloaded")
            raise
        timer = None
        if timeout < math.inf:  # a timer for each request, only where it was asked for
            left = arrived + timeout - job.arrived
            timer = self._loop.call_later(left, self._expire, timeout, job)
        self.pending += 1
        self._empty.clear()
        self.batcher.put(job)
        return timer

    def _enter_together(
        self, jobs: Sequence[Job], arrived: float, timeout: float
    ) -> asyncio.TimerHandle | None:
        """Queue jobs that found seats, all or none; returns what rings when their time is over.

        Raises:
            RequestExpired: Their time was over when they had been read.
            Overloaded: Not all of them could be answered in time.
        """
        timeout = self._time_for(jobs[0], arrived, timeout)
        for job in jobs:
            job.deadline = arrived + timeout
        self.pending += len(jobs)
        self._empty.clear()
        try:
            self.batcher.put_together(jobs)
        except Overloaded:
            self._release(len(jobs))
            self._metrics.rejected("overloaded")
            raise
        if timeout == math.inf:
            return None
        left = arrived + timeout - jobs[0].arrived
        return self._loop.call_later(left, self._expire, timeout, *jobs)

    def _time_for(self, job: Job, arrived: float, timeout: float) -> float:
        """Seconds that a request may take, by the client's wish and the model's settings.

        Raises:
            RequestExpired: They were over when it had been read; no worker shall get it.
        """
        timeout = min(timeout, self.settings.client_timeout or math.inf)
        if arrived + timeout <= job.arrived:
            self._metrics.rejected("expired")
            raise self._expired(timeout)
        return timeout

    def _leave_together(self, jobs: Sequence[Job]) -> None:
        """Nobody waits for the rows of a request any more."""
        for job in jobs:
            if job.stream is not None:
                job.stream.close()
        if jobs[0].dispatched is None:
            self._metrics.rejected(_why_unserved(jobs[0]))
        for job in jobs:
            self.queue.discard(job)
        self._release(len(jobs))

    def leave(self, job: Job) -> None:
        """Note that nobody waits for a job's answer any more: it has come, or is not wanted."""
        if job.dispatched is None:
            self.queue.discard(job)
            self._metrics.rejected(_why_unserved(job))
        self._release(1)

    def _release(self, count: int) -> None:
        self.pending -= count
        if not self.pending:
            self._empty.set()

    def _expire(self, timeout: float, *jobs: Job) -> None:
        for job in jobs:
            job.fail(self._expired(timeout))

    def _expired(self, timeout: float) -> RequestExpired:
        is_models = timeout == self.settings.client_timeout
        whose = "clientTimeoutInMills" if is_models else "X-Timeout-Ms"
        return RequestExpired(f"No prediction within {whose}={round(timeout * 1000)}.")

    def _no_room(self, priority: Priority, rows: int, *, by_version: bool) -> NoWorker:
        """The refusal of a request of several rows."""
        if not self.workers.is_open or self.queue.has_seat(priority, rows):
            return self.no_worker(by_version=by_version)
        return NoWorker(
            f'The queue of model "{self.name}" has {self.queue.free_seats(priority)} free seats, '
            "and the list has more items. Send fewer at a time, or give it a larger jobQueueSize."
        )

    def _strand(self) -> None:
        """Nobody is left to serve those in the queue."""
        for job in self.queue.clear():
            died = WorkerDied(self._last_cause()) if job.crashes else None  # to be run once more
            job.fail(died or self._refusal or self.no_worker())

    def _last_cause(self) -> str:
        failure = self.workers.last_failure
        return "" if failure is None else failure.cause or failure.what

    def _no_worker_message(self, by_version: bool) -> str:
        # The stray quote is TorchServe's; clients compare the text.
        version = f' Version {self.version}"' if by_version else ""
        return (
            f'Model "{self.name}"{version} has no worker to serve inference request. Please use '
            "scale workers API to add workers. If this is a sequence inference, please check if "
            f"it is closed, or expired; or exceeds maxSequenceJobQueueSize{self._why_no_worker()}"
        )

    def _why_no_worker(self) -> str:
        """How its workers failed, to be added to a sentence; nothing where some serve."""
        failure = self.workers.last_failure
        if self.workers.is_open or failure is None:
            return ""
        return f". Its worker has failed: {failure.reason}"


class Admission:
    """A request that was let in, until its answer has been taken.

    Args:
        model: Who let it in.
        job: What it became.
        counters: Of the way it came.
        arrived: When, on the monotonic clock.
        timer: Rings when its time is over.
    """

    __slots__ = ("_arrived", "_counters", "_job", "_model", "_timer")

    def __init__(
        self,
        model: ModelVersion,
        job: Job,
        counters: RequestCounters,
        arrived: float,
        timer: asyncio.TimerHandle | None,
    ) -> None:
        self._model = model
        self._job = job
        self._counters = counters
        self._arrived = arrived
        self._timer = timer

    def answered(self, answer: Answered) -> None:
        """The answer has come, or the first piece of it: that is in time, however long the rest."""
        if self._timer is not None:
            self._timer.cancel()
        if type(answer) is Stream:
            answer.most_waiting = self._model.most_stream_backlog
            answer.on_close = self._stream_closed
            return
        model, job = self._model, self._job
        model.leave(job)
        assert job.dispatched is not None
        now = time.monotonic()
        self._counters.answered(job.dispatched - job.arrived, now - self._arrived)
        if job.deadline < math.inf:
            model.batcher.handed_over(now)

    def give_up(self) -> None:
        """Nobody waits any more, not even for what comes behind a first piece; or it has failed."""
        if self._timer is not None:
            self._timer.cancel()
        if self._job.stream is not None:
            self._job.stream.close()
        self._model.leave(self._job)

    def _stream_closed(self, complete: bool) -> None:
        job = self._job
        self._model.leave(job)
        if complete and job.dispatched is not None:
            total = time.monotonic() - self._arrived
            self._counters.answered(job.dispatched - job.arrived, total)


def _group_of(input_: Input) -> Group:
    return Group.EXPLAIN if input_.headers.get("explain") == "True" else Group.PREDICT


def _why_unserved(job: Job) -> str:
    if job.future.cancelled():
        return "client_gone"
    error = job.future.exception()
    if isinstance(error, Overloaded):
        return "overloaded"
    return "expired" if isinstance(error, RequestExpired) else "no_worker"


@dataclass
class _Versions:
    default: str
    by_version: dict[str, ModelVersion] = field(default_factory=dict)


class ModelRegistry:
    """All models by name and version. The first version of a name becomes its default.

    Attributes:
        is_leaving: Whether the server is about to stop, and requests should go elsewhere.
        failed: Those that the start could not load, and that are therefore not among them.
    """

    def __init__(self) -> None:
        self._models: dict[str, _Versions] = {}
        self.is_leaving = False
        self.failed = FailedLoads()

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
            sentence = f"Model version: {version} does not exist for model: {name}"
            raise VersionNotFound(self._with_reason(sentence, name, version))
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
            raise ModelNotFound(self._with_reason(f"Model not found: {name}", name, None))
        return versions

    def _with_reason(self, sentence: str, name: str, version: str | None) -> str:
        """TorchServe's sentence, and why the start could not load what is asked for."""
        failed = self.failed.find(name, version)
        return f"{sentence}. It could not be loaded: {failed[0].reason}" if failed else sentence
