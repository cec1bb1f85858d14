"""The whole server: builds the object graph, opens and closes everything in order.

Only this file knows everybody. What is opened pushes how it is closed on one `AsyncExitStack`, so
that stopping is starting backwards, also when starting failed half-way. Backwards means here: stop
listening, let accepted requests finish, end the workers, close the connections, remove the files.
"""

import asyncio
import contextlib
import gc
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import uvloop
from aiohttp import web

from marserve.frontend.api.access_log import AccessLog
from marserve.frontend.api.auth import TokenStore
from marserve.frontend.api.description import description_routes
from marserve.frontend.api.door import Door, Route
from marserve.frontend.api.inference import inference_routes
from marserve.frontend.api.management import management_routes
from marserve.frontend.api.metrics import metrics_routes
from marserve.frontend.api.outputs import prelude
from marserve.frontend.config import Address, Config
from marserve.frontend.logs import configure_logging, log_directories
from marserve.frontend.models.manager import ModelManager
from marserve.frontend.models.pool import WorkerHost
from marserve.frontend.models.registry import ModelRegistry
from marserve.frontend.telemetry.metrics import Metrics
from marserve.frontend.telemetry.metrics_log import MetricsLog
from marserve.frontend.telemetry.system import SystemProbe
from marserve.frontend.workers.devices import DeviceAllocator, count_gpus
from marserve.frontend.workers.process import Launcher

logger = logging.getLogger(__name__)

_KEY_FILE = Path("key_file.json")
_MODEL_LABELS = ("model_name", "model_version", "hostname")
_BACKLOG = 1024
# SIGHUP: the terminal of --foreground was closed.
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# For connections that still write when every request has been answered.
_CLOSE_SECONDS = 2.0


def serve(config: Config) -> int:
    """Run the server until SIGTERM or SIGINT; the exit status."""
    try:
        with configure_logging(*log_directories()):
            try:
                uvloop.run(Server(config).run())
            except OSError as error:
                logger.error("The server cannot go on: %s", error)  # noqa: TRY400 - said in full
                return 1
    except OSError as error:
        print(f"The logs cannot be written: {error}", file=sys.stderr)  # noqa: T201 - nor be told there
        return 1
    return 0


class Server:
    """A server that is being run.

    Args:
        config: How.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._metrics = Metrics()
        self._registry = ModelRegistry()

    async def run(self) -> None:
        """Start, serve until told to stop, stop.

        Raises:
            OSError: A listener cannot be bound, or a directory cannot be used.
        """
        stop = asyncio.Event()
        for number in _STOP_SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        async with AsyncExitStack() as opened:
            if await _unless(stop, self._start(opened)):
                _spare_the_collector()
                logger.info("Model server started.")
                await stop.wait()
            logger.info("Stopping; accepted requests have %g s.", self._config.drain_timeout)
        logger.info("TorchServe has stopped.")

    async def _start(self, opened: AsyncExitStack) -> None:
        config = self._config
        for note in config.notes:
            logger.info("%s", note)
        for warning in config.warnings:
            logger.warning("%s", warning)
        self._watch_models()
        self._start_telemetry(opened)
        host = await self._make_host(opened)
        manager = ModelManager(self._registry, host, self._metrics, _make_workdir(opened))
        tokens = _make_tokens(config, opened)
        listeners = [
            (name, address, await self._make_listener(opened, routes, tokens))
            for name, address, routes in self._plan_listeners(manager, tokens)
        ]
        opened.push_async_callback(manager.close, config.drain_timeout)
        await manager.load_at_start(config.load_models)
        # Inference last: whoever gets an answer from /ping may count on the other listeners.
        for name, address, runner in reversed(listeners):
            site = web.TCPSite(runner, address.host, address.port, backlog=_BACKLOG)
            await site.start()
            opened.push_async_callback(site.stop)
            logger.info("%s API bind to: %s", name, address.url)

    async def _make_host(self, opened: AsyncExitStack) -> WorkerHost:
        config = self._config
        launcher = Launcher(config.worker_start_method, config.preload_modules)
        opened.callback(launcher.close)
        launcher.warm_up()
        gpus = await asyncio.to_thread(count_gpus)
        if config.number_of_gpu is not None:
            gpus = min(gpus, config.number_of_gpu)
        return WorkerHost(config, launcher, DeviceAllocator(gpus))

    def _plan_listeners(
        self, manager: ModelManager, tokens: TokenStore | None
    ) -> Sequence[tuple[str, Address, Mapping[str, Route]]]:
        """Name, address and routes of each listener; equal addresses share one."""
        config = self._config
        limit = config.max_request_size
        inference = inference_routes(self._registry, limit)
        management = management_routes(
            manager,
            self._registry,
            tokens=tokens,
            model_api=config.model_api,
            max_request_bytes=limit,
        )
        metrics = metrics_routes(self._metrics)
        wanted = [
            ("Inference", config.inference_address, inference),
            ("Management", config.management_address, management),
        ]
        if config.enable_metrics_api:
            wanted.append(("Metrics", config.metrics_address, metrics))
        planned: list[tuple[str, Address, Mapping[str, Route]]] = []
        for name, address, routes in wanted:
            same = [i for i, (_, other, _) in enumerate(planned) if other == address]
            if same and address.port:  # port 0 is another one for each
                others, _, shared = planned[same[0]]
                planned[same[0]] = (f"{others} and {name}", address, {**shared, **routes})
            else:
                planned.append((name, address, routes))
        return [
            (name, address, {**description_routes(name), **routes})
            for name, address, routes in planned
        ]

    async def _make_listener(
        self, opened: AsyncExitStack, routes: Mapping[str, Route], tokens: TokenStore | None
    ) -> web.ServerRunner:
        config = self._config
        door = Door(
            routes,
            tokens=tokens,
            local_management=tokens is None and config.disable_token_authorization is None,
            prelude=prelude(
                {
                    "access-control-allow-origin": config.cors_allowed_origin,
                    "access-control-allow-methods": config.cors_allowed_methods,
                    "access-control-allow-headers": config.cors_allowed_headers,
                }
            ),
            access_log=self._access_log,
            metrics=self._metrics,
        )
        runner = web.ServerRunner(door.server(), shutdown_timeout=_CLOSE_SECONDS)
        await runner.setup()
        opened.push_async_callback(runner.cleanup)
        return runner

    def _start_telemetry(self, opened: AsyncExitStack) -> None:
        config = self._config
        self._access_log = AccessLog(asyncio.get_running_loop())
        opened.callback(self._access_log.flush)
        if config.metrics_mode != "prometheus":
            log = MetricsLog(self._metrics, legacy=config.metrics_mode == "legacy")
            opened.push_async_callback(_cancel, _task(log.run()))
        if not config.disable_system_metrics:
            probe = SystemProbe(self._metrics, config.metric_time_interval)
            opened.push_async_callback(_cancel, _task(probe.run()))

    def _watch_models(self) -> None:
        """Gauges that are looked up when they are asked for."""
        host = self._metrics.hostname

        def queued() -> Iterable[tuple[Sequence[str], float]]:
            for model in self._registry:
                yield (model.name, model.version, host), len(model.queue)

        def pending() -> Iterable[tuple[Sequence[str], float]]:
            for model in self._registry:
                yield (model.name, model.version, host), model.pending

        def ready() -> Iterable[tuple[Sequence[str], float]]:
            for model in self._registry:
                yield (model.name, model.version, host), model.workers.ready

        watch = self._metrics.watch
        watch("marserve_queued_requests", "Requests that wait for a worker", _MODEL_LABELS, queued)
        watch("marserve_open_requests", "Requests not answered yet", _MODEL_LABELS, pending)
        watch("marserve_ready_workers", "Workers that can take a batch", _MODEL_LABELS, ready)


def _spare_the_collector() -> None:
    """Keep the garbage collector from walking, again and again, over what lives as long as we do.

    A request leaves little behind that reference counting does not free, so it may come less often.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)


def _make_workdir(opened: AsyncExitStack) -> Path:
    """A private directory for unpacked archives, gone when the server is."""
    workdir = Path(tempfile.mkdtemp(prefix="marserve-", dir=os.environ.get("TEMP") or None))
    opened.callback(shutil.rmtree, workdir, ignore_errors=True)
    return workdir


def _make_tokens(config: Config, opened: AsyncExitStack) -> TokenStore | None:
    if not config.token_authorization:
        return None
    tokens = TokenStore(_KEY_FILE, config.token_expiration_min * 60)
    opened.callback(tokens.close)
    logger.warning("Token authorization is on; the keys are in %s.", tokens.path.resolve())
    return tokens


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Do something unless told to stop meanwhile; whether it was done."""
    working, stopping = _task(work), asyncio.ensure_future(stop.wait())
    ends: set[asyncio.Future[Any]] = {working, stopping}
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if working.done():
        working.result()
        return True
    await _cancel(working)
    return False


def _task(work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
    return asyncio.get_running_loop().create_task(work)


async def _cancel(task: "asyncio.Task[None]") -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
