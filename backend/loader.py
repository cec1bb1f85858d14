"""Loads a model by the name of its handler, from the archive or the built-in handlers.

A name is ``module`` or ``module:function`` with or without ``.py``. A module with the function
(else ``handle``) at its top level is a function handler, initialised by the call ``function(None,
context)``. Otherwise exactly one class must be defined in it, whose ``initialize(context)`` and
``handle`` are used, even if a function is named: SageMaker's archives name
``handler_service.py:handle`` for a file with a class. ``module:ClassName`` selects that class.

TorchServe tries its own handlers after any ImportError. Here the file is searched for first, and an
error inside it is reported as it is.
"""

import importlib
import importlib.util
import inspect
import logging
import os
import uuid
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from marserve.backend.context import Context
from marserve.backend.errors import HandlerUnusable
from marserve.backend.manifest import Manifest
from marserve.backend.metrics import MetricsStore
from marserve.backend.profiling.samples import warm_up
from marserve.backend.protocol import Load
from marserve.backend.service import EntryPoint, Service, Stages
from marserve.backend.tensors.checks import DECLARATION, is_declaration
from marserve.backend.tensors.stacking import Stacking

logger = logging.getLogger(__name__)

Run = Callable[[Coroutine[Any, Any, Any]], Any]

_OWN_NAME = "ts"
_OWN_HANDLERS = f"{_OWN_NAME}.torch_handler"
_ENVELOPES = f"{_OWN_HANDLERS}.request_envelope"
_DEFAULT_FUNCTION = "handle"
_NOT_OPTIMIZED = (
    "optimization of model-config.yaml is applied by BaseHandler.initialize, which this handler "
    "does not run: it has no effect, unless the handler reads it."
)
_COROUTINE = "The handler is a coroutine; model-config.yaml needs asyncCommunication: true"


class Handler(NamedTuple):
    """The functions of a handler; ``owner`` is the object or module with its optional methods."""

    initialize: Callable[[Context], Any]
    entry_point: EntryPoint
    owner: Any
    instance: Any = None


def load_service(load: Load, run: Run | None = None) -> Service:
    """Import the handler, initialise it, and run its warm-ups.

    ``run`` runs a coroutine; None if handlers cannot be coroutines. Raises any exception of the
    handler.
    """
    _check_own_name()
    context = _make_context(load)
    handler = find_handler(load.handler)
    entry_point = handler.entry_point
    entry = entry_point if handler.instance is None else handler.instance.handle
    if run is None and inspect.iscoroutinefunction(entry):
        raise HandlerUnusable(_COROUTINE)
    if load.envelope:
        if load.asynchronous:
            raise HandlerUnusable("A request envelope cannot wrap an asynchronous handler")
        entry_point = wrap(entry_point, find_envelope(load.envelope))
    if load.stack_inputs and load.envelope:
        raise HandlerUnusable(f"stackInputs cannot be used with the envelope {load.envelope!r}")
    started = handler.initialize(context)
    if inspect.iscoroutine(started):  # a function handler that is a coroutine
        if run is None:
            started.close()
            raise HandlerUnusable(_COROUTINE)
        run(started)
    settings: Any = context.model_yaml_config
    is_optimized = getattr(handler.instance, "is_optimized", False)
    if isinstance(settings, dict) and settings.get("optimization") and not is_optimized:
        context.load_warnings.append(_NOT_OPTIMIZED)
    by_handler = _declared_tensors(handler.owner)
    tensors = context.tensors = _declared_in(context) or by_handler
    service = Service(
        entry_point,
        context,
        owner=handler.owner,
        decode_input=_decodes_input(handler.owner),
        max_response_bytes=load.max_response_bytes,
        stages=_overlapping(handler.instance, load) if load.overlap_stages else None,
        tensors=tensors,
        batch_dims=load.batch_dims,
        json_nan=load.json_nan,
        stacking=_stacking(load, tensors),
    )
    warm_up(load, service)
    may_overlap = hasattr(handler.instance, "overlap_obstacle")
    if service.stages is None and may_overlap and handler.instance.concurrent_inferences() > 1:
        logger.info(
            "Each batch has all devices to itself: with overlapStages: true in model-config.yaml "
            "the next one would follow it."
        )
    return service


def _decodes_input(owner: Any) -> bool:
    """Return whether JSON and text are decoded: as configured, and not for an ``is_relay``."""
    is_configured = os.environ.get("TS_DECODE_INPUT_REQUEST", "true") == "true"
    return is_configured and getattr(owner, "is_relay", False) is not True


def find_handler(name: str) -> Handler:
    """Return the handler with a name; raises ImportError, HandlerUnusable."""
    if not name:
        raise HandlerUnusable("No handler is named: not in the manifest, if there is one.")
    module_name, _, function = name.partition(":")
    module = _import_module(module_name)
    entry = getattr(module, function or _DEFAULT_FUNCTION, None)
    if inspect.isclass(entry):
        return _of_class(entry)
    if callable(entry):
        # Modules may share one object by a bound method at the top level.
        owner = entry.__self__ if inspect.ismethod(entry) else module
        return Handler(lambda context: entry(None, context), entry, owner)
    classes = _classes_of(module)
    if len(classes) != 1:
        missing = f"There is no function or class {function!r}. " if function else ""
        raise HandlerUnusable(
            f"{missing}Expected only one class in custom service code or a function entry point "
            f"{[each.__name__ for each in classes]}; keep helper classes in another module, or "
            "name the class: handler.py:Class"
        )
    if function and function != _DEFAULT_FUNCTION:
        logger.warning(
            "There is no function or class %r in handler %r; its class %s is served.",
            function,
            module_name,
            classes[0].__name__,
        )
    return _of_class(classes[0])


def find_envelope(name: str) -> Callable[[EntryPoint], Any]:
    """Return the class of a request envelope: the first, by name, of its module."""
    full_name = f"{_ENVELOPES}.{name}"
    try:
        module = importlib.import_module(full_name)
    except ModuleNotFoundError as error:
        if error.name != full_name:
            raise
        raise ModuleNotFoundError(f"There is no request envelope {name!r}") from error
    classes = _classes_of(module)
    if not classes:
        raise HandlerUnusable(f"Request envelope {name!r} defines no class")
    return classes[0]


def wrap(entry_point: EntryPoint, envelope: Callable[[EntryPoint], Any]) -> EntryPoint:
    """Return a handler's entry point inside an envelope."""
    around = envelope(entry_point)

    def enter(data: Any, context: Context) -> Any:
        if context.get_request_header(0, "describe") == "True":  # it has no envelope
            return entry_point(data, context)
        return around.handle(data, context)

    return enter


def _overlapping(instance: Any, load: Load) -> Stages:
    if load.asynchronous:
        obstacle = "the handler is a coroutine"
    elif load.envelope:
        obstacle = f"the request envelope {load.envelope!r} is around the handler as a whole"
    elif instance is None:
        obstacle = "the handler is a function"
    elif not hasattr(instance, "overlap_obstacle"):
        obstacle = f"{type(instance).__name__} is not a BaseHandler"
    else:
        obstacle = instance.overlap_obstacle()
    if obstacle:
        raise HandlerUnusable(f"overlapStages cannot be true: {obstacle}")
    stages: Stages = instance
    return stages


def _check_own_name() -> None:
    """Raise ImportError if ``ts`` is another package, whose classes are not ours."""
    package = importlib.import_module(_OWN_NAME)
    if getattr(package, "PROVIDED_BY", None) != "marserve":
        raise ImportError(
            f"The import name {_OWN_NAME!r} belongs to {package.__file__}, not to marserve; "
            "uninstall torchserve, or rename the file in the archive"
        )


def _import_module(name: str) -> ModuleType:
    stem = name.removesuffix(".py").rpartition("/")[2]
    if importlib.util.find_spec(stem) is not None:
        return importlib.import_module(stem)
    own = f"{_OWN_HANDLERS}.{stem}"
    try:
        return importlib.import_module(own)
    except ModuleNotFoundError as error:
        if error.name != own:
            raise
    raise ModuleNotFoundError(
        f"There is no handler {name!r}: "
        f"neither {stem}.py in the archive nor a built-in of that name"
    )


def _classes_of(module: ModuleType) -> list[type]:
    return [
        member
        for _, member in inspect.getmembers(module, inspect.isclass)
        if member.__module__ == module.__name__
    ]


def _of_class(handler: type) -> Handler:
    instance = handler()
    if not callable(getattr(instance, "handle", None)):
        raise HandlerUnusable(f"Expect handle method in class {handler.__name__}")
    # Looked up at each call: handlers may replace self.handle in initialize.
    return Handler(
        instance.initialize,
        lambda data, context: instance.handle(data, context),
        owner=instance,
        instance=instance,
    )


def _declared_tensors(owner: Any) -> dict[str, Any]:
    """Return the tensors that the handler declares, by an attribute or a method."""
    declared = getattr(owner, "open_inference", None)
    if inspect.isroutine(declared):
        declared = declared()
    if declared is None:
        return {}
    if not is_declaration(declared):
        raise HandlerUnusable(f"open_inference of the handler is not {DECLARATION}")
    tensors: dict[str, Any] = declared
    return tensors


def _declared_in(context: Context) -> dict[str, Any]:
    yaml: Any = context.model_yaml_config
    declared: Any = yaml.get("openInference") if isinstance(yaml, dict) else None
    tensors: dict[str, Any] = declared if is_declaration(declared) else {}
    return tensors


def _stacking(load: Load, tensors: dict[str, Any]) -> Stacking | None:
    if not load.stack_inputs:
        return None
    try:
        return Stacking(load.stack_inputs, load.batch_dims[0], tensors.get("inputs", ()))
    except ImportError as error:
        raise HandlerUnusable(f"stackInputs needs {load.stack_inputs}: {error}") from error


def _make_context(load: Load) -> Context:
    manifest = Manifest.read(Path(load.model_dir))
    metrics = MetricsStore(declared=load.declared_metrics)
    context = Context(
        load.model_name,
        load.model_dir,
        None if manifest is None else manifest.raw,
        load.batch_size,
        load.gpu_id,
        load.server_version,
        load.limit_max_image_pixels,
        metrics,
        _model_yaml(load, manifest),
    )
    context.max_response_bytes = load.max_response_bytes
    context.json_nan = load.json_nan
    metrics.request_ids = str(uuid.uuid4())  # of the load, until the first batch
    if load.compiled_sizes:  # else as in TorchServe
        context.system_properties["compiled_batch_sizes"] = load.compiled_sizes
    return context


def _model_yaml(load: Load, manifest: Manifest | None) -> Any:
    if manifest is None or not manifest.config_file:
        return {}
    # By name: YAML is not in the standard library, and backend/ does not import handlers/.
    utils = importlib.import_module("marserve.handlers.utils")
    return utils.get_yaml_config(str(Path(load.model_dir, manifest.config_file)))
