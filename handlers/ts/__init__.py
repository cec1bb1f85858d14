"""TorchServe's import names.

``ts.torch_handler.base_handler`` is the same module object as ``marserve.handlers.base_handler``,
so that there is one class for `isinstance` and for patches. A finder on `sys.meta_path` does it:

* It is the first, because the usual finders would load the file a second time.
* The import system writes the alias into the module's ``__spec__``, which is restored after
  loading, so that reloading and ``find_spec`` of the real name work.
* The parents of all names are packages, created empty. A parent that is an alias itself, such as
  ``model_archiver``, forwards attributes to its target.

Importing ``ts`` loads no targets.
"""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

#: Distinguishes this package from another distribution's of the same name.
PROVIDED_BY = "marserve"

_SAME_NAMES = (
    "base_handler",
    "dali_image_classifier",
    "densenet_handler",
    "image_classifier",
    "image_segmenter",
    "object_detector",
    "text_classifier",
    "text_handler",
    "trt_llm_handler",
    "vision_handler",
    "vllm_handler",
    *(f"request_envelope.{name}" for name in ("base", "body", "json", "kserve", "kservev2")),
)
_TARGETS = {f"ts.torch_handler.{name}": f"marserve.handlers.{name}" for name in _SAME_NAMES} | {
    "ts.context": "marserve.backend.context",
    "ts.handler_utils.distributed.deepspeed": "marserve.handlers.engines.deepspeed",
    "ts.handler_utils.hf_batch_streamer": "marserve.handlers.engines.hugging_face",
    "ts.handler_utils.micro_batching": "marserve.handlers.performance.micro_batching",
    "ts.handler_utils.preprocess.dali": "marserve.handlers.engines.dali",
    "ts.handler_utils.text_utils": "marserve.handlers.inputs.texts",
    "ts.handler_utils.timer": "marserve.handlers.timer",
    "ts.handler_utils.utils": "marserve.handlers.utils",
    "ts.llm_launcher": "marserve.tools.llm_launcher",
    "ts.launcher": "marserve.tools.launcher",
    "ts.metrics.caching_metric": "marserve.backend.metrics",
    "ts.metrics.dimension": "marserve.backend.metrics",
    "ts.metrics.metric": "marserve.backend.metrics",
    "ts.metrics.metric_cache_abstract": "marserve.handlers.torchserve_api.metric_cache",
    "ts.metrics.metric_cache_errors": "marserve.handlers.torchserve_api.metric_cache",
    "ts.metrics.metric_cache_yaml_impl": "marserve.handlers.torchserve_api.metric_cache",
    "ts.metrics.metric_collector": "marserve.handlers.torchserve_api.metric_collector",
    "ts.metrics.metric_type_enum": "marserve.backend.metrics",
    "ts.metrics.metrics_store": "marserve.backend.metrics",
    "ts.metrics.process_memory_metric": "marserve.handlers.torchserve_api.metric_collector",
    "ts.metrics.system_metrics": "marserve.handlers.torchserve_api.system_metrics",
    "ts.metrics.unit": "marserve.backend.metrics",
    "ts.model_loader": "marserve.handlers.torchserve_api.offline_service",
    "ts.model_service.model_service": "marserve.handlers.torchserve_api.model_service",
    "ts.protocol.otf_message_handler": "marserve.handlers.torchserve_api.predict_response",
    "ts.service": "marserve.handlers.torchserve_api.offline_service",
    "ts.torch_handler.contractions": "marserve.handlers.inputs.texts",
    "ts.torch_handler.dali_handler": "marserve.handlers.engines.dali",
    "ts.torch_handler.distributed.base_deepspeed_handler": "marserve.handlers.engines.deepspeed",
    "ts.torch_handler.unit_tests.test_utils.mock_context": "marserve.handlers.torchserve_api.mock_context",
    "ts.torch_handler.unit_tests.test_utils.model_dir": "marserve.handlers.torchserve_api.mock_context",
    "ts.utils.hf_utils": "marserve.handlers.engines.hugging_face",
    "ts.utils.util": "marserve.handlers.utils",
    "model_archiver": "marserve.tools.archiver.archiver",
    "model_archiver.arg_parser": "marserve.tools.archiver.archiver",
    "model_archiver.manifest_components.manifest": "marserve.tools.archiver.manifest_components",
    "model_archiver.manifest_components.model": "marserve.tools.archiver.manifest_components",
    "model_archiver.model_archiver": "marserve.tools.archiver.archiver",
    "model_archiver.model_archiver_config": "marserve.tools.archiver.archiver",
    "model_archiver.model_archiver_error": "marserve.tools.archiver.archiver",
    "model_archiver.model_packaging": "marserve.tools.archiver.model_packaging_utils",
    "model_archiver.model_packaging_utils": "marserve.tools.archiver.model_packaging_utils",
    "model_archiver.version": "marserve.tools.archiver.archiver",
    "workflow_archiver": "marserve.tools.archiver.workflow_archiver",
    "workflow_archiver.arg_parser": "marserve.tools.archiver.workflow_archiver",
    "workflow_archiver.version": "marserve.tools.archiver.workflow_archiver",
    "workflow_archiver.workflow_archiver_error": "marserve.tools.archiver.workflow_archiver",
    "workflow_archiver.workflow_packaging": "marserve.tools.archiver.workflow_archiver",
    "workflow_archiver.workflow_packaging_utils": "marserve.tools.archiver.workflow_archiver",
}
_PIPPY = (
    "ts.handler_utils.distributed.pt_pippy",
    "ts.torch_handler.distributed.base_pippy_handler",
)
_NO_PIPPY = (
    "PiPPy is no longer developed and not supported: use torch.distributed.pipelining "
    "in the handler, with parallelType: pp in model-config.yaml"
)
_PACKAGES = {
    ".".join(parts[:length])
    for parts in (name.split(".") for name in _TARGETS)
    for length in range(1, len(parts))
} - {__name__}
_SERVED = ("ts", "model_archiver", "workflow_archiver")
_REAL = {__name__, f"{__name__}.version"}  # files beside this one


def is_served(name: str) -> bool:
    """Return whether a module can be imported by this name."""
    return name in _TARGETS or name in _PACKAGES or name in _REAL


def target_of(name: str) -> str:
    """Return the real name of an alias; empty for a package or a file of this one."""
    return _TARGETS.get(name, "")


def refusal(name: str) -> str:
    """Return why a name is not served and what replaces it; empty if unknown."""
    return _NO_PIPPY if name in _PIPPY else ""


class _AliasFinder(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        if fullname.partition(".")[0] not in _SERVED or fullname in _REAL:
            return None
        if fullname in _TARGETS or fullname in _PACKAGES:
            return ModuleSpec(fullname, self, is_package=fullname in _PACKAGES)
        if fullname in _PIPPY:  # part of torch now, with another interface
            raise ImportError(_NO_PIPPY)
        raise ModuleNotFoundError(f"marserve does not provide {fullname!r}", name=fullname)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        if spec.name in _PACKAGES:
            return None  # an ordinary empty module
        module = importlib.import_module(_TARGETS[spec.name])
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ not in _PACKAGES:
            assert module.__spec__ is not None
            module.__spec__ = module.__spec__.loader_state
        elif module.__name__ in _TARGETS:
            real = importlib.import_module(_TARGETS[module.__name__])
            module.__dict__["__getattr__"] = lambda name: getattr(real, name)

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the code that ``python -m`` runs."""
        spec = importlib.util.find_spec(_TARGETS[fullname])
        loader: Any = None if spec is None else spec.loader
        code: CodeType | None = loader.get_code(_TARGETS[fullname])
        return code


def __getattr__(name: str) -> Any:
    if name in ("version", "__version__"):  # on demand: reading package metadata takes a while
        version = importlib.import_module(f"{__name__}.version")
        return version if name == "version" else version.__version__
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


sys.meta_path.insert(0, _AliasFinder())
