"""The watchers of the dashboard, which get an overview each second, and details of one model.

The feeds are made only while somebody watches.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from marserve.backend.protocol import Prediction
from marserve.frontend.aio.long_work import LongWork
from marserve.frontend.batching.jobs import Stream
from marserve.frontend.errors import ServerBusy
from marserve.frontend.operations.dashboard_feeds import Details, Overview
from marserve.frontend.serving.model_version import ModelVersion
from marserve.frontend.serving.registry import ModelRegistry
from marserve.frontend.telemetry.gpu import Gpu, GpuReader
from marserve.frontend.workflows.workflow import WorkflowRegistry

_PERIOD_SECONDS = 1.0
# A watcher that reads too slowly is disconnected; its page connects again.
_MAX_BACKLOG_BYTES = 4 << 20
_MAX_WATCHERS = 100
_EVENTS = {"content-type": "text/event-stream"}


@dataclass(eq=False)
class Dashboard:
    """The watchers of a server."""

    registry: ModelRegistry
    workflows: WorkflowRegistry
    gpus: GpuReader
    inference_address: str = ""
    long_work: LongWork = field(default_factory=LongWork)
    overview: Overview = field(init=False)

    def __post_init__(self) -> None:
        self.overview = Overview(self.registry, self.inference_address)
        self._details: dict[ModelVersion, Details] = {}
        #: All streams, also of those who wait for their first event.
        self._streams: set[Stream] = set()
        #: The model of each stream that has its first event.
        self._watched: dict[Stream, ModelVersion | None] = {}
        self._is_watched = asyncio.Event()
        self._is_closed = False
        #: So that a new watcher gets each change once, within its first event or after it.
        self._updating = asyncio.Lock()

    async def run(self) -> None:
        """Send events to the watchers until cancelled."""
        while True:
            await self._is_watched.wait()  # without a deadline: for the first watcher
            await asyncio.sleep(_PERIOD_SECONDS)
            async with self._updating:
                await self._update()

    async def _update(self) -> None:
        overview = await self.long_work.run(self.overview.update(await self._read_gpus()))
        events: dict[ModelVersion | None, bytes] = {None: overview}
        models = set(self.registry)
        for model, details in list(self._details.items()):
            if model in models:
                events[model] = overview + await self.long_work.run(details.update())
        for stream, watched in list(self._watched.items()):
            if watched in events:
                stream.push(events[watched])
            else:  # it was unregistered; the page connects again
                stream.end()

    async def watch(self, model: ModelVersion | None) -> Stream:
        """Return a stream of server-sent events, with details of a model if one is given.

        Raises:
            ServerBusy: There are too many watchers, or the server stops.
        """
        if self._is_closed or len(self._streams) >= _MAX_WATCHERS:
            raise ServerBusy(f"{_MAX_WATCHERS} pages receive events already, or the server stops.")
        stream = Stream(Prediction(b"", headers=_EVENTS))
        stream.max_waiting_bytes = _MAX_BACKLOG_BYTES
        stream.on_close = lambda _complete, _broken: self._left(stream)
        self._streams.add(stream)  # before the first await, for the limit
        try:
            async with self._updating:
                await self._welcome(stream, model)
        except BaseException:
            stream.close()
            raise
        return stream

    async def _welcome(self, stream: Stream, model: ModelVersion | None) -> None:
        if not self._watched:
            await self.long_work.run(self.overview.update(await self._read_gpus()))
        event = self.overview.whole()
        if model is not None:
            details = self._details.get(model)
            if details is None:
                details = Details(model, self.workflows)
                await self.long_work.run(details.update())
            event += await self.long_work.run(details.whole())
            # Not before: this watcher may leave meanwhile, or the last other one.
            self._details[model] = details
        stream.push(event)
        self._watched[stream] = model
        self._is_watched.set()

    def close(self) -> None:
        """End all streams, and accept no more."""
        self._is_closed = True
        for stream in list(self._streams):
            stream.end()

    def _left(self, stream: Stream) -> None:
        self._streams.discard(stream)
        model = self._watched.pop(stream, None)
        if model is not None and model not in self._watched.values():
            self._details.pop(model, None)
        if not self._watched:
            self._is_watched.clear()

    async def _read_gpus(self) -> Sequence[Gpu]:
        has_gpus = any(worker.gpu_id is not None for m in self.registry for worker in m.workers)
        return await self.gpus.read() if has_gpus else ()
