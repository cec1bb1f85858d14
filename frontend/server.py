"""The server: builds the object graph, and starts and stops its parts in order.

Each part that starts pushes its end on one `AsyncExitStack`, so that stopping is the reverse of
starting, also after a start that failed: stop listening, finish accepted requests, end the workers,
close the connections, remove the files.
"""

import asyncio
import contextlib
import faulthandler
import gc
import logging
import os
import ssl
import sys
import threading
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import uvloop

from marserve.backend.large_messages import keep_freed_memory
from marserve.frontend.aio.background import BackgroundTasks, in_abandonable_thread, unless
from marserve.frontend.catalog.changes import CatalogChanges
from marserve.frontend.catalog.synchroniser import make_synchroniser
from marserve.frontend.configuration.addresses import UnixAddress
from marserve.frontend.configuration.config import Config
from marserve.frontend.configuration.config_file import SNAPSHOT_FOLDER, WRITTEN_BY
from marserve.frontend.configuration.memory import bytes_in_flight
from marserve.frontend.configuration.properties import ConfigError
from marserve.frontend.configuration.tls import load_identity, server_context
from marserve.frontend.http.limits import raise_descriptor_limit
from marserve.frontend.lifecycle.daemon import FORCED_END_SECONDS, StartReport
from marserve.frontend.lifecycle.pidfile import PidFile
from marserve.frontend.lifecycle.service_manager import ServiceManager
from marserve.frontend.lifecycle.signals import Signals, ignore_signals
from marserve.frontend.lifecycle.startup import banner, find_conflicts
from marserve.frontend.lifecycle.stop_watchdog import StopWatchdog
from marserve.frontend.lifecycle.temporary_files import TemporaryFiles
from marserve.frontend.lifecycle.terminal import print_text
from marserve.frontend.lifecycle.workdir import guard_workdir, own_workdir, remove_leftovers
from marserve.frontend.logs.config import configure_logging
from marserve.frontend.logs.setup import (
    DETAIL,
    explain_unwritable,
    log_directories,
    reopen_log_files,
)
from marserve.frontend.logs.writers import are_stuck, wait_written
from marserve.frontend.operations.dashboard import Dashboard
from marserve.frontend.operations.management import ModelManagement
from marserve.frontend.operations.requests import RequestLines
from marserve.frontend.operations.services import Services
from marserve.frontend.operations.workflows import WorkflowManagement
from marserve.frontend.registration.autoscaler import Autoscaler
from marserve.frontend.registration.debugging import leaves_interrupts, warn_if_unknown
from marserve.frontend.registration.initial_models import register_initial_models
from marserve.frontend.registration.manager import ModelManager
from marserve.frontend.registration.snapshot import RestoreFailed, SnapshotWriter
from marserve.frontend.rest.endpoints import HttpEndpoints
from marserve.frontend.security.given_tokens import GivenTokens, Tokens
from marserve.frontend.security.tokens import TokenStore
from marserve.frontend.serving.host import WorkerHost
from marserve.frontend.serving.model_calls import ModelCalls
from marserve.frontend.serving.monitoring import start_monitoring
from marserve.frontend.serving.readiness import unready, until_ready
from marserve.frontend.serving.registry import ModelRegistry
from marserve.frontend.serving.torch_options import wait_environment
from marserve.frontend.telemetry.access_log import AccessLog
from marserve.frontend.telemetry.gpu import GpuReader, count_gpus_in_time
from marserve.frontend.telemetry.metrics import Metrics
from marserve.frontend.telemetry.metrics_config import load_metrics_config
from marserve.frontend.telemetry.trace_context import NO_SAMPLING, Sampling
from marserve.frontend.tracing.otel import SpanExport, find_receiver, sampling_of
from marserve.frontend.tracing.time_lines import TimeLines
from marserve.frontend.version import __version__
from marserve.frontend.workers.devices import DeviceAllocator
from marserve.frontend.workers.launchers.command import cpu_launcher_works
from marserve.frontend.workers.launchers.local import LocalLauncher
from marserve.frontend.workers.supervisor import START_SECONDS
from marserve.frontend.workflows.registrar import WorkflowRegistrar
from marserve.frontend.workflows.workflow import WorkflowRegistry

if TYPE_CHECKING:
    from marserve.frontend.grpc.endpoints import GrpcListener, TlsIdentity
    from marserve.frontend.http.listeners import BoundListener

logger = logging.getLogger(__name__)

_Listener: TypeAlias = "BoundListener | GrpcListener"

_KEY_FILE = Path("key_file.json")
# For the removal of the files of killed servers, which does not delay the start.
_LEFTOVERS_SECONDS = 60.0


def serve(config: Config, report: StartReport, *, verbose: bool, pid_file: PidFile) -> int:
    """Run the server until SIGTERM or SIGINT; return the exit status.

    With ``verbose`` the console gets as much as the log file. ``pid_file`` is released before the
    server is ended by force, in which case this does not return.
    """
    raise_descriptor_limit()
    keep_freed_memory()
    faulthandler.enable(sys.__stderr__ or 2)  # systemd's watchdog aborts a server that hangs
    starter = ServiceManager.from_environ(os.environ)
    starter.main_process(os.getpid())
    watchdog = StopWatchdog(config.stop_seconds, pid_file.release)
    try:
        status = 0
        with configure_logging(
            *log_directories(),
            config.log_settings,
            as_json=config.log_format == "json",
            verbose=verbose,
            properties=config.java_properties,
        ):
            try:
                uvloop.run(Server(config, report, watchdog, starter, pid_file).run())
            except (OSError, RestoreFailed) as error:
                logger.error("The server cannot continue: %s", error)  # noqa: TRY400 - no traceback
                report.failed(str(error))
                status = 1
    except ConfigError as error:
        return _report_failure(str(error), report)  # the log is not open
    except OSError as error:
        return _report_failure(explain_unwritable(error), report)
    finally:
        ignore_signals()
    if are_stuck():  # the end of the interpreter waits for what their threads hold
        pid_file.release()
        os._exit(status)
    return status


def _report_failure(reason: str, report: StartReport) -> int:
    print_text(reason, sys.stderr)
    report.failed(reason)
    return 1


class Server:
    """A running server."""

    def __init__(
        self,
        config: Config,
        report: StartReport,
        watchdog: StopWatchdog,
        starter: ServiceManager,
        pid_file: PidFile,
    ) -> None:
        self._config = config
        self._watchdog = watchdog
        self._report = report
        self._starter = starter
        self._pid_file = pid_file
        self._files: TemporaryFiles
        self._tls: ssl.SSLContext | None = None
        self._grpc_tls: TlsIdentity | None = None
        self._url = ""
        self._metrics = Metrics(
            config=load_metrics_config(
                config.metrics_config, auto_detect=config.model_metrics_auto_detect
            )
        )
        self._registry = ModelRegistry()
        self._workflows = WorkflowRegistry()
        self._manager: ModelManager
        self._error: Exception | None = None  # that ends the server

    async def run(self) -> None:
        """Start, serve until a signal to stop, stop.

        Raises:
            OSError: A listener cannot be bound, or a directory cannot be used.
            RestoreFailed: The models of a snapshot cannot be served.
        """
        self._watchdog.loop = asyncio.get_running_loop()
        signals = Signals(
            self._start_reload, partial(leaves_interrupts, self._registry), self._watchdog.begin
        )
        async with AsyncExitStack() as opened:
            try:
                await self._serve(opened, signals)
            finally:
                self._watchdog.begin()  # after a failure no signal has started it
        logger.info("TorchServe has stopped.")

    async def _serve(self, opened: AsyncExitStack, signals: Signals) -> None:
        if await unless(signals.stop, self._start(opened, signals)):
            _freeze_garbage_collector()
            if conflicts := await in_abandonable_thread(find_conflicts):
                logger.warning("%s", conflicts)
            self._announce()
            self._starter.ready(f"Listens at {self._url}")
            await signals.stop.wait()
            if self._error is not None:
                raise self._error
            self._starter.stopping(self._config.stop_seconds + FORCED_END_SECONDS)
            await self._let_balancers_notice(signals.skip_balancers)
        signals.skip_balancers.set()
        logger.info(
            "Stopping; accepted requests have %g s, and Ctrl-C gives them up.",
            self._config.drain_timeout,
        )

    def _announce(self) -> None:
        """Say that the server has started: in the log, on the console and to a starter."""
        as_json = self._config.log_format == "json"
        logger.info("Model server started.", extra=None if as_json else DETAIL)
        failed = {load.name for load in self._registry.failed}
        loading = sorted(unready(self._registry) - failed)

        def announce() -> None:
            wait_written()  # the starter prints its line after the log, and may be the only reader
            if not as_json:
                # The words by which scripts detect the start of TorchServe, with any log level.
                with contextlib.suppress(OSError):  # it is closed
                    os.write(1, b"Model server started.\n")
            self._report.listening(self._url, loading, sorted(failed))

        # The console's reader may have stopped.
        threading.Thread(target=announce, name="announcement", daemon=True).start()

    async def _let_balancers_notice(self, skip: asyncio.Event) -> None:
        """Serve for ``lame_duck_seconds``, with /ready answering 503."""
        self._manager.announce_stop()
        if seconds := self._config.lame_duck_seconds:
            logger.info(
                "Stopping; /ready says 503 from now on, and clients are served for %g s more.",
                seconds,
            )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await skip.wait()

    def _start_reload(self) -> None:
        threading.Thread(target=self._reload, name="reload", daemon=True).start()

    def _reload(self) -> None:
        """Handle SIGHUP: open the log files, perhaps moved ones, and the certificates again.

        In a thread: a file that is written may be held up by its disk.
        """
        try:
            reopen_log_files()
            logger.info("SIGHUP: the log files were opened again.")
            if self._config.has_tls and self._config.tls_files.are_configured:
                if self._tls is not None:
                    load_identity(self._tls, self._config.tls_files)
                if self._grpc_tls is not None:
                    self._grpc_tls.reload()
                logger.info("SIGHUP: the certificates were read again.")
        except (OSError, ConfigError) as error:
            logger.error("SIGHUP: %s", error)  # noqa: TRY400 - no traceback

    async def _start(self, opened: AsyncExitStack, signals: Signals) -> None:
        config = self._config
        for note in config.notes:
            logger.info("%s", note)
        for warning in config.warnings:
            logger.warning("%s", warning)
        access_log = AccessLog(
            asyncio.get_running_loop(), self._metrics, as_json=config.log_format == "json"
        )
        opened.callback(access_log.flush)
        background = await opened.enter_async_context(BackgroundTasks())
        background.keep_running("The sign of life", partial(_notify_watchdog, self._starter))
        workdir = await self._make_workdir(opened)  # first: it marks all processes
        self._watchdog.workdir = workdir
        gpus = GpuReader()
        start_monitoring(background, config, self._metrics, self._registry, gpus)
        host = await self._make_host(opened)
        sampling = self._export_spans(opened, host.time_lines)
        facts = banner(config, gpus=host.devices.count, cores=host.cores, workdir=workdir)
        logger.info("%s", facts, extra=DETAIL)
        manager = self._manager = ModelManager(
            self._registry, host, self._metrics, workdir, _make_snapshot_writer(config)
        )
        catalog = make_synchroniser(config, manager, self._registry, self._metrics)
        changes = (
            CatalogChanges(catalog.store.place, manager, self._registry) if catalog else manager
        )
        management = ModelManagement(
            changes, self._registry, gpus, config.model_api, catalog.describe if catalog else None
        )
        registrar = WorkflowRegistrar(
            self._workflows, manager, self._registry, config, self._metrics, host.time_lines
        )
        workflows = WorkflowManagement(self._workflows, registrar, config.model_api)
        tokens = _make_tokens(config)
        dashboard = Dashboard(self._registry, self._workflows, gpus, config.inference_address.url)
        background.keep_running("The samples of traffic", dashboard.overview.traffic.run)
        background.keep_running("The dashboard", dashboard.run)
        services = Services(
            config,
            self._registry,
            management,
            workflows,
            self._metrics,
            access_log,
            tokens,
            RequestLines(host.time_lines, self._registry),
            dashboard,
            sampling,
        )
        listeners = await self._bind(opened, services)
        opened.callback(dashboard.close)  # before the connections are closed
        if isinstance(tokens, TokenStore):  # not before: the file may be that of a running server
            _write_keys(tokens, config, opened)
        await opened.enter_async_context(
            manager.running(config.drain_timeout, signals.skip_requests, self._workflows.drained)
        )
        await opened.enter_async_context(registrar.running())
        if catalog is None:
            await register_initial_models(manager, config)
        else:
            await opened.enter_async_context(catalog.running())
        if config.debugged:
            warn_if_unknown(config.debugged, self._registry)
        await _listen(opened, [each for each in listeners if not each.when_ready])
        autoscaler = Autoscaler(self._registry, manager.set_current_workers)
        scaling = await opened.enter_async_context(BackgroundTasks())
        scaling.keep_running("Autoscaling", autoscaler.run)
        await manager.snapshots.begin()
        if later := [each for each in listeners if each.when_ready]:
            await self._listen_when_ready(opened, later, signals.stop)

    async def _make_workdir(self, opened: AsyncExitStack) -> Path:
        """Make a directory for unpacked archives, which is removed even if the server is killed."""
        directory = opened.enter_context(own_workdir())
        path = directory.path
        files = self._files = TemporaryFiles(directory, self._pid_file.keep)
        watch = await opened.enter_async_context(BackgroundTasks())
        watch.keep_running("The guard", partial(guard_workdir, path))
        watch.keep_running("The care for temporary files", files.run)
        watch.start(in_abandonable_thread(remove_leftovers, path.parent, _LEFTOVERS_SECONDS))
        return path

    def _export_spans(self, opened: AsyncExitStack, time_lines: TimeLines) -> Sampling:
        """Send the spans of recorded requests to OpenTelemetry's receiver, if there is one."""
        config = self._config
        receiver = find_receiver(config.otel_endpoint, os.environ)
        if receiver is None:
            return NO_SAMPLING
        dropped = self._metrics.added["marserve_dropped_spans_total"].join(self._metrics.hostname)
        dropped.show()
        export = SpanExport(receiver, dropped.update)
        time_lines.on_recorded = export.add
        export.start()
        opened.push_async_callback(export.close)
        return sampling_of(config.trace_sample_ratio, os.environ)

    async def _bind(self, opened: AsyncExitStack, services: Services) -> Sequence[_Listener]:
        """Bind all listeners; return them in the order in which they start to listen."""
        config = self._config
        self._tls = server_context(config.tls_files) if config.has_https else None
        of_http = await HttpEndpoints(services, self._tls).bind(opened)
        addresses = [each.address for each in of_http]
        self._files.sockets = [each.path for each in addresses if isinstance(each, UnixAddress)]
        of_grpc = await self._bind_grpc(opened, services)
        self._url = of_http[0].address.url
        # Inference last: when /ping answers, the other listeners do too.
        return [*reversed(of_grpc), *reversed(of_http)]

    async def _listen_when_ready(
        self, opened: AsyncExitStack, listeners: Sequence[_Listener], stop: asyncio.Event
    ) -> None:
        """Start the listeners of a platform, which sends requests as soon as it can connect."""

        async def wait_and_listen() -> None:
            await until_ready(self._registry)
            logger.info("Every model is READY; requests of the platform are let in.")
            await _listen(listening, listeners)

        def end(error: Exception) -> None:
            self._error = error
            stop.set()

        listening = await opened.enter_async_context(AsyncExitStack())
        waiting = await opened.enter_async_context(BackgroundTasks())
        waiting.start(wait_and_listen(), end)

    async def _bind_grpc(
        self, opened: AsyncExitStack, services: Services
    ) -> "Sequence[GrpcListener]":
        config = self._config
        if not config.enable_grpc:
            return ()
        try:
            # Here, because it costs memory and time, and may not be installed.
            from marserve.frontend.grpc.endpoints import GrpcEndpoints, TlsIdentity
        except ImportError as error:
            is_wanted = config.platform.setup.grpc_inference or any(
                "grpc" in name for name in config.texts
            )
            logger.log(
                logging.WARNING if is_wanted else logging.INFO,
                "gRPC is not served: %s. To have it: pip install grpcio grpcio-reflection protobuf",
                error,
            )
            return ()
        self._grpc_tls = TlsIdentity(config.tls_files) if config.enable_grpc_ssl else None
        return await GrpcEndpoints(services, self._grpc_tls).bind(opened)

    async def _make_host(self, opened: AsyncExitStack) -> WorkerHost:
        config = self._config
        launcher = LocalLauncher(
            config.worker_start_method,
            config.preload_modules,
            max(START_SECONDS, config.default_startup_timeout),
            lambda: self._metrics.fork_server_replacements.update(1),
            wait_environment(config.torch_wait_policy, os.environ),
        )
        opened.push_async_callback(launcher.close)
        launcher.warm_up()
        gpus = await count_gpus_in_time()
        if config.number_of_gpu is not None:
            gpus = min(gpus, config.number_of_gpu)
        calls = ModelCalls(
            self._registry,
            max_request_bytes=config.max_request_size,
            max_answer_bytes=config.max_response_size,
            max_bytes=max(bytes_in_flight(config.max_bytes_in_flight), config.max_request_size),
        )
        host = WorkerHost(config, launcher, DeviceAllocator(gpus), calls_by=calls.by)
        if config.cpu_launcher_enable:
            arguments = config.cpu_launcher_args or ""
            host.cpu_launcher = await in_abandonable_thread(
                cpu_launcher_works, host.python, arguments
            )
        return host


async def _listen(opened: AsyncExitStack, listeners: Iterable[_Listener]) -> None:
    """Accept clients until ``opened`` is closed, and log the addresses."""
    for listener in listeners:
        await listener.listen(opened)
        logger.info("%s API bind to: %s", listener.name, listener.address.url)


def _freeze_garbage_collector() -> None:
    """Exclude the objects of the start from garbage collection; requests leave few cycles."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)


async def _notify_watchdog(starter: ServiceManager) -> None:
    """Notify the service manager, twice as often as required, that the event loop runs."""
    while starter.watchdog_seconds:
        starter.alive()
        await asyncio.sleep(starter.watchdog_seconds / 2)


def _make_snapshot_writer(config: Config) -> SnapshotWriter | None:
    if not config.snapshots_kept or config.model_catalog:  # the catalog is the list of models
        return None
    directory = log_directories()[0] / SNAPSHOT_FOLDER
    properties = {"version": f"{WRITTEN_BY} {__version__}", **config.texts}
    return SnapshotWriter(directory.absolute(), properties, config.snapshots_kept)


def _make_tokens(config: Config) -> Tokens | None:
    if not (config.token_authorization or config.local_management):
        return None
    if config.token_directory is None:
        return TokenStore(_KEY_FILE, config.token_expiration_min * 60)
    logger.warning("Token authorization is on; the keys are in %s.", config.token_directory)
    try:
        return GivenTokens(config.token_directory)
    except (OSError, ValueError) as error:
        raise ConfigError(f"token_directory: {error}") from None


def _write_keys(tokens: TokenStore, config: Config, opened: AsyncExitStack) -> None:
    try:
        tokens.write()
    except OSError as error:
        if config.local_management:
            logger.warning("There are no keys, which local requests do not need: %s.", error)
            return
        raise OSError(
            f"The keys cannot be written: {error}. Start in a directory in which this user may "
            "write, or set token_directory."
        ) from error
    opened.callback(tokens.close)
    path = tokens.path.resolve()
    if config.local_management:
        logger.info("Requests through a proxy need the management key in %s.", path)
    else:
        logger.warning("Token authorization is on; the keys are in %s.", path)
