"""Registers and unregisters workflows: opens an archive, and registers its nodes as models.

If one cannot be registered, the others are unregistered again. A change runs in a separate task, so
that it is complete even if its client disconnects.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from marserve.backend.manifest import ManifestError, WorkflowManifest
from marserve.frontend.aio.background import BackgroundTasks, outcome_of
from marserve.frontend.archives.archive import Archive
from marserve.frontend.archives.contents import WorkflowContents
from marserve.frontend.configuration.config import Config
from marserve.frontend.errors import (
    Conflict,
    ModelNotFound,
    ServeError,
    ServerStopping,
    WorkersFailed,
    WorkflowFailed,
    WorkflowNotFound,
    WorkflowRefused,
)
from marserve.frontend.logs.formats import one_line
from marserve.frontend.registration.manager import ModelManager
from marserve.frontend.registration.model_changes import Registration
from marserve.frontend.serving.model_version import ModelVersion
from marserve.frontend.serving.registry import ModelRegistry
from marserve.frontend.telemetry.metrics import Metrics, WorkflowMetrics
from marserve.frontend.tracing.time_lines import TimeLines
from marserve.frontend.workflows.execution import Graph, model_name
from marserve.frontend.workflows.specification import Node, Specification, read_specification
from marserve.frontend.workflows.workflow import Workflow, WorkflowRegistry

logger = logging.getLogger(__name__)

T = TypeVar("T")

_NODES_AT_ONCE = 4  # that are being loaded


@dataclass(frozen=True)
class WorkflowRegistration:
    """A workflow to register; an empty name means the name in the manifest."""

    url: str  # of the archive, as `ArchiveOpener.open_workflow` accepts it
    name: str = ""
    response_timeout: float | None = None  # seconds, of each node's workers; None: as configured
    startup_timeout: float | None = None
    s3_sse_kms: bool = False


@dataclass(eq=False)
class WorkflowRegistrar:
    """Registers and unregisters workflows, within `running`."""

    workflows: WorkflowRegistry
    manager: ModelManager
    models: ModelRegistry
    config: Config
    metrics: Metrics
    time_lines: TimeLines

    def __post_init__(self) -> None:
        self._background = BackgroundTasks()
        #: Names that are being registered.
        self._registering: set[str] = set()
        #: Workflows that finish their runs; the event is set when they are unregistered.
        self._leaving: dict[str, asyncio.Event] = {}

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Allow changes within the block; its end cancels unfinished ones."""
        try:
            async with self._background:
                yield
        finally:
            for workflow in self.workflows:
                workflow.refusal = ServerStopping

    async def register(self, registration: WorkflowRegistration) -> Workflow:
        """Open an archive, register its nodes, and serve it when all their workers are ready."""
        return await self._run(self._register(registration))

    async def unregister(self, name: str) -> None:
        """Refuse further runs, finish the others, and unregister all nodes.

        Raises:
            WorkflowFailed: A node could not be unregistered; the workflow is unregistered.
        """
        await self._run(self._unregister(name))

    async def _register(self, registration: WorkflowRegistration) -> Workflow:
        archives = self.manager.archives
        async with AsyncExitStack() as undo:
            archive, contents = await archives.open_workflow(
                registration.url, s3_sse_kms=registration.s3_sse_kms
            )
            undo.push_async_callback(archives.remove, archive)
            manifest = _named(contents.manifest, registration.name)
            name = manifest.workflow_name
            with self._claimed(name):
                specification = read_specification(contents.specification)
                _check_handler(specification, contents)
                if gone := self._leaving.get(name):
                    await gone.wait()  # its `unregister` has the deadline
                models = await self._register_nodes(registration, manifest, archive, specification)
                undo.pop_all()
                metrics = WorkflowMetrics(self.metrics, name, specification.nodes)
                longest = self.config.max_response_size
                graph = Graph(name, specification, self.models, metrics, longest)
                queues = (model.settings.batching.queue_size for model in models)
                max_runs = self.config.max_workflow_runs or min(queues)
                lines = self.time_lines.of_model(name, "")
                workflow = Workflow(archive, graph, max_runs, lines)
                self.workflows.add(workflow)
        logger.info("Workflow %s registered: %s", name, specification.dag_text)
        return workflow

    async def _register_nodes(
        self,
        registration: WorkflowRegistration,
        manifest: WorkflowManifest,
        archive: Archive,
        specification: Specification,
    ) -> list[ModelVersion]:
        turns = asyncio.Semaphore(_NODES_AT_ONCE)

        async def register(node: Node) -> ModelVersion:
            wanted = _registration_of(node, registration, manifest, archive)
            async with turns:
                if any(model.name == wanted.name for model in self.models):
                    raise Conflict(f"Model {wanted.name} is registered already.")
                return await self.manager.register(wanted)

        nodes = list(specification.nodes.values())
        outcomes = await asyncio.gather(*map(register, nodes), return_exceptions=True)
        models = [outcome for outcome in outcomes if isinstance(outcome, ModelVersion)]
        failures = []
        for node, outcome in zip(nodes, outcomes, strict=True):
            if isinstance(outcome, WorkersFailed):
                failures.append(outcome.message)
            elif isinstance(outcome, BaseException):
                name = model_name(manifest.workflow_name, node.name)
                why = one_line(outcome) if isinstance(outcome, Exception) else "it was cancelled"
                failures.append(f"Workflow Node {name} failed to register. Details: {why}")
        if not failures:
            return models
        await self._unregister_nodes(model.name for model in models)
        raise WorkflowFailed(
            f"Workflow {manifest.workflow_name} has failed to register. "
            f"Failures: [{', '.join(failures)}]"
        )

    async def _unregister(self, name: str) -> None:
        workflow = self.workflows.find(name)
        self.workflows.remove(workflow)
        workflow.refusal = partial(WorkflowNotFound, f"Workflow not found: {name}")
        gone = self._leaving[name] = asyncio.Event()
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.config.unregister_model_timeout):
                    await workflow.drained()
            failures = await self._unregister_nodes(workflow.graph.model_names.values())
            workflow.graph.metrics.close()
            workflow.lines.close()
            await self.manager.archives.remove(workflow.archive)
        finally:
            del self._leaving[name]
            gone.set()
        if failures:
            raise WorkflowFailed(
                f"Error while unregistering the workflow {name}. Details: [{', '.join(failures)}]"
            )
        logger.info("Workflow %s unregistered.", name)

    async def _unregister_nodes(self, names: Iterable[str]) -> list[str]:
        async def unregister(name: str) -> str:
            try:
                await self.manager.unregister(name)
            except ModelNotFound:
                logger.info("Node %s was unregistered before.", name)
            except ServeError as error:
                return f"Error while unregistering workflow node {name}: {one_line(error)}"
            return ""

        return [each for each in await asyncio.gather(*map(unregister, names)) if each]

    @contextlib.contextmanager
    def _claimed(self, name: str) -> Iterator[None]:
        if name in self.workflows or name in self._registering:
            raise Conflict(f"Workflow {name} is already registered.")
        self._registering.add(name)
        try:
            yield
        finally:
            self._registering.discard(name)

    async def _run(self, change: Coroutine[Any, Any, T]) -> T:
        """Complete a change, even if its caller is cancelled."""
        return await outcome_of(self._background.start(change, _log_failure))


def _named(manifest: WorkflowManifest, name: str) -> WorkflowManifest:
    """Return the manifest with the name of the registration, if it has one."""
    named = replace(manifest, workflow_name=name or manifest.workflow_name)
    try:
        named.validate()
    except ManifestError as error:
        raise WorkflowRefused(str(error)) from error
    return named


def _check_handler(specification: Specification, contents: WorkflowContents) -> None:
    functions = [node.name for node in specification.nodes.values() if node.is_function]
    if functions and not contents.has_handler:
        file = contents.manifest.handler
        missing = f"the handler file {file} is not in the archive" if file else "it has no handler"
        raise WorkflowRefused(
            f"{functions[0]} is not in models, so it must be a function; but {missing}."
        )


def _registration_of(
    node: Node, registration: WorkflowRegistration, manifest: WorkflowManifest, archive: Archive
) -> Registration:
    """Return the registration of a node; a function is a model in the workflow's directory."""
    settings, workflow = node.settings, manifest.workflow_name
    timeouts = {
        "response_timeout": registration.response_timeout,
        "startup_timeout": registration.startup_timeout,
    }
    return Registration(
        url=node.url or str(archive.directory),
        name=model_name(workflow, node.name),
        handler=f"{manifest.handler}:{node.name}" if node.is_function else "",
        initial_workers=settings.max_workers,
        settings={
            "size": settings.batch_size,
            "delay": settings.max_batch_delay_ms / 1000,
            **{name: seconds for name, seconds in timeouts.items() if seconds is not None},
        },
        workflow=workflow,
        is_function=node.is_function,
    )


def _log_failure(error: Exception) -> None:
    """Log a change that failed: its caller may have been cancelled."""
    traceback = None if isinstance(error, ServeError) else error
    logger.warning("A change of the workflows failed: %s", one_line(error), exc_info=traceback)
