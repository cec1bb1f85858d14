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
import ssl
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import uvloop

from marserve.frontend.background import BackgroundTasks, unless
from marserve.frontend.banner import banner
from marserve.frontend.configuration.addresses import Address
from marserve.frontend.configuration.config import Config
from marserve.frontend.configuration.config_file import SNAPSHOT_FOLDER, WRITTEN_BY
from marserve.frontend.configuration.properties import ConfigError
from marserve.frontend.configuration.tls import load_identity, server_context
from marserve.frontend.debugging import leaves_interrupts, warn_if_unknown
from marserve.frontend.http.access_log import AccessLog
from marserve.frontend.http.authentication import KINDS, Guard, Kind, TokenStore
from marserve.frontend.http.connections import HttpServer
from marserve.frontend.http.fast_path import FastConnection
from marserve.frontend.http.limits import ConnectionLimits
from marserve.frontend.http.listeners import (
    BoundListener,
    Listener,
    bind_listener,
    raise_descriptor_limit,
    share_addresses,
)
from marserve.frontend.http.responses import common_headers
from marserve.frontend.http.router import Route, Router
from marserve.frontend.installation import find_conflicts
from marserve.frontend.logs.config import configure_by_file
from marserve.frontend.logs.setup import (
    DETAIL,
    configure_logging,
    explain_unwritable,
    log_directories,
    reopen_log_files,
)
from marserve.frontend.models.autoscaler import Autoscaler
from marserve.frontend.models.host import WorkerHost
from marserve.frontend.models.initial_models import register_initial_models
from marserve.frontend.models.manager import ModelManager
from marserve.frontend.models.model_version import ModelVersion
from marserve.frontend.models.registry import ModelRegistry
from marserve.frontend.models.snapshot import RestoreFailed, SnapshotWriter
from marserve.frontend.rest.api_description import description_routes
from marserve.frontend.rest.inference import inference_routes
from marserve.frontend.rest.loggers import logger_routes
from marserve.frontend.rest.management import management_routes
from marserve.frontend.rest.metrics import metrics_routes
from marserve.frontend.rest.readiness import unready
from marserve.frontend.rest.shared_routes import shared_routes
from marserve.frontend.signals import Signals
from marserve.frontend.start_report import StartReport
from marserve.frontend.telemetry.gpu import count_gpus, within_deadline
from marserve.frontend.telemetry.metrics import Metrics
from marserve.frontend.telemetry.metrics_config import load_metrics_config
from marserve.frontend.telemetry.metrics_log import MetricsLog
from marserve.frontend.telemetry.system import SystemProbe
from marserve.frontend.version import __version__
from marserve.frontend.workers.devices import DeviceAllocator
from marserve.frontend.workers.launchers.command import cpu_launcher_works
from marserve.frontend.workers.launchers.local import LocalLauncher

logger = logging.getLogger(__name__)

_KEY_FILE = Path("key_file.json")
_MODEL_LABELS = ("model_name", "model_version", "hostname")
# For connections that still write when every request has been answered.
_CLOSE_SECONDS = 2.0


def serve(config: Config, report: StartReport | None = None, *, verbose: bool = False) -> int:
    """Run the server until SIGTERM or SIGINT.

    Args:
        config: How.
        report: Where the outcome of the start is reported; None for nowhere.
        verbose: Whether the console gets as much as the log file.

    Returns:
        The exit status.
    """
    report = report or StartReport()
    raise_descriptor_limit()
    try:
        with _open_logs(config, verbose=verbose):
            try:
                uvloop.run(Server(config, report).run())
            except (OSError, RestoreFailed) as error:
                logger.error("The server cannot go on: %s", error)  # noqa: TRY400 - the sentence is enough
                report.failed(str(error))
                return 1
    except ConfigError as error:
        return _give_up(str(error), report)  # there is no log for it
    except OSError as error:
        return _give_up(explain_unwritable(error), report)  # nor for this
    return 0


def _give_up(reason: str, report: StartReport) -> int:
    print(reason, file=sys.stderr)  # noqa: T201
    report.failed(reason)
    return 1


def _open_logs(config: Config, *, verbose: bool) -> ExitStack:
    settings = config.log_settings
    configure = (
        partial(configure_by_file, settings, properties=config.java_properties)
        if settings
        else configure_logging
    )
    return configure(
        *log_directories(),
        as_json=config.log_format == "json",
        asynchronous=config.async_logging,
        verbose=verbose,
    )


class Server:
    """A server that is being run.

    Args:
        config: How.
        report: Where the outcome of its start is reported.
    """

    def __init__(self, config: Config, report: StartReport) -> None:
        self._config = config
        self._report = report
        self._tls: ssl.SSLContext | None = None
        self._url = ""
        self._metrics = Metrics(
            config=load_metrics_config(
                config.metrics_config, auto_detect=config.model_metrics_auto_detect
            )
        )
        self._registry = ModelRegistry()

    async def run(self) -> None:
        """Start, serve until a signal to stop, stop.

        Raises:
            OSError: A listener cannot be bound, or a directory cannot be used.
            RestoreFailed: A snapshot asks for what cannot be served.
        """
        signals = Signals(self._reload, partial(leaves_interrupts, self._registry))
        async with AsyncExitStack() as opened:
            if await unless(signals.stop, self._start(opened, signals.skip_requests)):
                _spare_the_collector()
                if conflicts := await asyncio.to_thread(find_conflicts):
                    logger.warning("%s", conflicts)
                _announce(as_json=self._config.log_format == "json")
                failed = sorted({load.name for load in self._registry.failed})
                loading = [name for name in unready(self._registry) if name not in failed]
                self._report.listening(self._url, loading, failed)
                await signals.stop.wait()
                await self._let_balancers_notice(signals.skip_balancers)
            signals.skip_balancers.set()
            logger.info(
                "Stopping; accepted requests have %g s, and Ctrl-C gives them up.",
                self._config.drain_timeout,
            )
        logger.info("TorchServe has stopped.")

    async def _let_balancers_notice(self, skip: asyncio.Event) -> None:
        """Serve on for a while, with /ready answering that it is not for long."""
        self._registry.is_leaving = True
        seconds = self._config.lame_duck_seconds
        if seconds:
            logger.info(
                "Stopping; /ready says 503 from now on, and clients are served for %g s more.",
                seconds,
            )
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(skip.wait(), seconds)

    def _reload(self) -> None:
        """At SIGHUP: open the log files anew, which may have been moved, and read the certificates.

        What cannot be read leaves things as they are.
        """
        try:
            reopen_log_files()
            logger.info("SIGHUP: the log files were opened again.")
            if self._tls is not None and self._config.tls_files.are_given:
                load_identity(self._tls, self._config.tls_files)
                logger.info("SIGHUP: the certificates were read again.")
        except (OSError, ConfigError) as error:
            logger.error("SIGHUP: %s", error)  # noqa: TRY400 - all there is to say

    async def _start(self, opened: AsyncExitStack, skip_requests: asyncio.Event) -> None:
        config = self._config
        for note in config.notes:
            logger.info("%s", note)
        for warning in config.warnings:
            logger.warning("%s", warning)
        self._watch_models()
        await self._start_telemetry(opened)
        host = await self._make_host(opened)
        workdir = _make_workdir(opened)
        facts = banner(config, gpus=host.devices.count, cores=host.cores, workdir=workdir)
        logger.info("%s", facts, extra=DETAIL)
        manager = ModelManager(
            self._registry, host, self._metrics, workdir, _make_snapshot_writer(config)
        )
        tokens = _make_tokens(config, opened)
        self._tls = server_context(config.tls_files) if config.has_https else None
        places = [
            (listener.name, await self._bind(opened, listener, tokens))
            for listener in self._plan_listeners(manager, tokens)
        ]
        await opened.enter_async_context(manager.running(config.drain_timeout, skip_requests))
        await register_initial_models(manager, self._registry, config)
        if config.debugged:
            warn_if_unknown(config.debugged, self._registry)
        # Inference last: whoever gets an answer from /ping may count on the other listeners.
        for name, place in reversed(places):
            await place.listen(opened)
            logger.info("%s API bind to: %s", name, place.address.url)
        autoscaler = Autoscaler(self._registry, manager.vary_workers)
        background = await opened.enter_async_context(BackgroundTasks())
        background.keep_running("Autoscaling", autoscaler.run)
        await manager.snapshots.begin()
        self._url = places[0][1].address.url

    async def _make_host(self, opened: AsyncExitStack) -> WorkerHost:
        config = self._config
        launcher = LocalLauncher(config.worker_start_method, config.preload_modules)
        opened.callback(launcher.close)
        launcher.warm_up()
        gpus = await within_deadline(count_gpus, 0)
        if config.number_of_gpu is not None:
            gpus = min(gpus, config.number_of_gpu)
        host = WorkerHost(config, launcher, DeviceAllocator(gpus))
        if config.cpu_launcher_enable:
            host.cpu_launcher = await asyncio.to_thread(cpu_launcher_works, host.python)
        return host

    def _plan_listeners(
        self, manager: ModelManager, tokens: TokenStore | None
    ) -> Sequence[Listener]:
        """Each listener with its routes; equal addresses share one."""
        config = self._config
        limit = config.max_request_size
        open_inference = config.ts_open_inference_protocol
        inference = inference_routes(self._registry, limit, open_inference=open_inference)
        management = management_routes(
            manager,
            self._registry,
            tokens=tokens,
            model_api=config.model_api,
            max_request_bytes=limit,
        )
        metrics = metrics_routes(self._metrics, legacy=config.metrics_mode == "legacy")
        wanted = [
            Listener("Inference", config.inference_address, inference),
            Listener("Management", config.management_address, {**management, **logger_routes()}),
        ]
        if config.enable_metrics_api:
            wanted += [Listener("Metrics", one, metrics) for one in config.metrics_addresses]

        def join(first: Listener, second: Listener) -> Mapping[str, Route]:
            guard = self._guard(first, tokens)
            return shared_routes(first.routes, second.routes, self._registry, guard)

        return [
            replace(
                listener,
                routes={
                    **description_routes(listener.name, open_inference=open_inference),
                    **listener.routes,
                },
            )
            for listener in share_addresses(wanted, join)
        ]

    def _guard(self, listener: Listener, tokens: TokenStore | None) -> Guard:
        # No web page has a way to a unix socket.
        if not isinstance(listener.address, Address):
            return Guard(tokens)
        if self._config.debugged:
            return Guard(tokens, local=KINDS)
        local: Sequence[Kind] = ("management",) if self._config.local_management else ()
        return Guard(tokens, local=local)

    async def _bind(
        self,
        opened: AsyncExitStack,
        listener: Listener,
        tokens: TokenStore | None,
    ) -> BoundListener:
        """Give a listener its place; the connections of its clients end with the server."""
        config = self._config
        router = Router(
            listener.routes,
            guard=self._guard(listener, tokens),
            access_log=self._access_log,
            common_headers=self._common_headers(),
        )
        limits = ConnectionLimits(
            head_timeout=config.request_head_timeout,
            body_timeout=config.request_body_timeout,
            body_rate=config.request_body_rate,
            max_connections=config.max_connections,
        )
        clients = HttpServer(router, limits, FastConnection)
        opened.push_async_callback(clients.close, _CLOSE_SECONDS)
        timeout = config.request_head_timeout
        return await bind_listener(
            opened, listener.address, clients, tls=self._tls, handshake_timeout=timeout
        )

    def _common_headers(self) -> str:
        """The header lines of every answer."""
        config = self._config
        return common_headers(
            {
                "access-control-allow-origin": config.cors_allowed_origin,
                "access-control-allow-methods": config.cors_allowed_methods,
                "access-control-allow-headers": config.cors_allowed_headers,
            }
        )

    async def _start_telemetry(self, opened: AsyncExitStack) -> None:
        config = self._config
        self._access_log = AccessLog(
            asyncio.get_running_loop(), self._metrics, as_json=config.log_format == "json"
        )
        opened.callback(self._access_log.flush)
        background = await opened.enter_async_context(BackgroundTasks())
        if config.metrics_mode != "prometheus":
            log = MetricsLog(
                self._metrics,
                legacy=config.metrics_mode == "legacy",
                as_json=config.log_format == "json",
                delayed=config.async_logging,
            )
            background.keep_running("The metrics log", log.run)
        if not config.disable_system_metrics:
            probe = SystemProbe(
                self._metrics,
                config.metric_time_interval,
                gpus=config.number_of_gpu,
                command=config.system_metrics_cmd,
                pids=self._worker_pids,
            )
            background.keep_running("The measurement of the host", probe.run)

    def _worker_pids(self) -> Iterable[int]:
        workers = (worker for model in self._registry for worker in model.workers)
        return [worker.pid for worker in workers if worker.pid is not None]

    def _watch_models(self) -> None:
        """Gauges that are looked up when they are asked for."""
        registry, host = self._registry, self._metrics.hostname

        def gauge(name: str, help_: str, value: Callable[[ModelVersion], float]) -> None:
            def samples() -> Iterable[tuple[Sequence[str], float]]:
                return [((model.name, model.version, host), value(model)) for model in registry]

            self._metrics.watch(name, help_, _MODEL_LABELS, samples)

        def failed() -> Iterable[tuple[Sequence[str], float]]:
            return [
                ((*key, host), 1) for key in {(load.name, load.version) for load in registry.failed}
            ]

        self._metrics.watch(
            "marserve_failed_loads", "Models the start could not load", _MODEL_LABELS, failed
        )
        gauge(
            "marserve_queued_requests",
            "Requests that wait for a worker",
            lambda model: len(model.queue),
        )
        gauge("marserve_open_requests", "Requests not answered yet", lambda model: model.pending)
        gauge(
            "marserve_ready_workers",
            "Workers that can take a batch",
            lambda model: model.workers.ready,
        )


def _announce(*, as_json: bool) -> None:
    """Announce the start as TorchServe does: on standard output, where scripts wait for it.

    They find the words there whatever log levels and layouts their users have chosen; but whoever
    asked for JSON gets nothing else.
    """
    logger.info("Model server started.", extra=None if as_json else DETAIL)
    if not as_json:
        with contextlib.suppress(OSError):  # nobody reads it
            print("Model server started.", flush=True)  # noqa: T201


def _spare_the_collector() -> None:
    """Keep the garbage collector from visiting, again and again, what lives as long as the server.

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


def _make_snapshot_writer(config: Config) -> SnapshotWriter | None:
    if not config.snapshots_kept:
        return None
    directory = log_directories()[0] / SNAPSHOT_FOLDER
    properties = {"version": f"{WRITTEN_BY} {__version__}", **config.texts}
    return SnapshotWriter(directory.absolute(), properties, config.snapshots_kept)


def _make_tokens(config: Config, opened: AsyncExitStack) -> TokenStore | None:
    if not config.token_authorization:
        return None
    tokens = TokenStore(_KEY_FILE, config.token_expiration_min * 60)
    opened.callback(tokens.close)
    logger.warning("Token authorization is on; the keys are in %s.", tokens.path.resolve())
    return tokens
