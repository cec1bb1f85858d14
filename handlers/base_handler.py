"""The base class of handlers: loads a PyTorch model and runs it over batches.

    preprocess(list of requests) → inference(tensor) → postprocess(tensor) → list of answers

The kind of the serialized file decides how the model is loaded:

* with a model file    a state dict (a pickle or ``.safetensors``) for the model file's class
* ``.pt``, ``.pth``    TorchScript; TorchServe refused the second name
* ``.pt2``             a program of torch.export or a package of AOTInductor
* ``.onnx``            an onnxruntime session, which the subclass's `inference` has to call
* ``.so``              compiled ahead of time, if model-config.yaml declares it

The loader finds a handler as the only class of its module, so no other class may be defined here.
Subclasses define helpers of any name (``_predict``, ``_load_model``, ``pipeline``): methods that
TorchServe's class does not have begin with two underscores.
"""

import importlib
import importlib.util
import inspect
import logging
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch.profiler import profile, tensorboard_trace_handler

from marserve.backend.context import Context
from marserve.backend.errors import PredictionException
from marserve.handlers.devices import choose_device, env_is_true, is_installed, optimize_with_ipex
from marserve.handlers.model_files import (
    NOT_LOADED,
    explained,
    import_model_file,
    is_torchscript,
    load_exported,
    load_onnx,
    load_state_dict,
    load_torchscript,
)
from marserve.handlers.model_files import setup_ort_session as setup_ort_session  # re-exported
from marserve.handlers.performance.optimization import SECTION, read_optimization
from marserve.handlers.performance.optimized_model import (
    OptimizedModel,
    made_in,
    optimize,
    refuse_optimization,
)
from marserve.handlers.performance.program_rows import ProgramForRows, SessionForRows
from marserve.handlers.performance.stage_run import (
    EXPLAIN,
    BatchContext,
    Steps,
    finish,
    is_profiling,
    report_time,
    run_stages,
)
from marserve.handlers.performance.torch_compile import compile_model, load_warnings_of
from marserve.handlers.performance.weights import make_with_weights, raised_precision
from marserve.handlers.refusals import RefusedInputs, UnusableInput
from marserve.handlers.timer import timed
from marserve.handlers.utils import check_valid_pt2_backend as check_valid_pt2_backend
from marserve.handlers.utils import (
    list_classes_from_module,
    load_label_mapping,
    value_of,
    yaml_config_of,
)

logger = logging.getLogger(__name__)

PROFILER_AVAILABLE = PT2_AVAILABLE = PT230_AVAILABLE = True  # TorchServe's flags
STAGES = ("preprocess", "inference", "postprocess")

_NOT_NUMBERS = OverflowError, RuntimeError, TypeError, ValueError  # raised by torch.as_tensor


class BaseHandler:
    """Loads a model and takes batches through `preprocess`, `inference` and `postprocess`."""

    # Not set in `__init__`: subclasses may have one that does not call this class's.
    context: Any = BatchContext()  # of the current batch
    stage_pipeline: Callable[[Any], Any] | None = None  # runs the three stages over a batch
    model_pt_path: str | None = None  # the manifest's serialized file
    manifest: Any = None
    map_location: str | None = None  # kind of device, as torch.load takes it
    explain = False  # whether the current batch asks for explanations
    target: Any = 0  # the class to explain if the request names none
    profiler_args: Mapping[str, Any] = MappingProxyType({})  # for torch.profiler.profile
    __optimized_model: OptimizedModel | None = None

    def __init__(self) -> None:
        self.model: Any = None
        self.mapping: dict[str, str] | None = None  # class index to name: index_to_name.json
        self.device: Any = None
        self.context = None
        self.initialized = False
        self.profiler_args = {}

    def initialize(self, context: Context) -> None:
        """Choose the device, load and optimize the model, read the class names.

        Raises:
            OptionRefused: An option of model-config.yaml is not possible here.
            RuntimeError: No weights could be loaded.
            ValueError: The model file does not define exactly one class.
        """
        properties = context.system_properties
        model_dir = str(properties["model_dir"])
        self.context = context
        self.manifest = context.manifest
        self.model_yaml_config: Mapping[str, Any] = yaml_config_of(context)
        self.map_location, self.device = choose_device(properties.get("gpu_id"))
        serialized_file = self.__manifest_entry("serializedFile")
        if serialized_file:
            self.model_pt_path = str(Path(model_dir, serialized_file))
        self.model = self.__optimized(self.__load_model(model_dir))
        self.mapping = load_label_mapping(Path(model_dir, "index_to_name.json"))
        self.initialized = True

    def handle(self, data: Any, context: Context) -> Any:
        """Return one answer per request; ``data`` has a dict of parameters for each."""
        started = time.perf_counter()
        self.context = context
        if self._is_describe():
            output: Any = [self.describe_handle()]
        elif is_profiling():
            output, _ = self._infer_with_profiler(data)
        else:
            output = self.__predict(data)
        report_time(context, time.perf_counter() - started)
        return output

    @timed
    def preprocess(self, data: Any) -> Any:
        """Return the requests as one tensor of shape ``(requests, …)``.

        A request is a number or nested lists of numbers; others are `RefusedInputs`. With
        ``stackInputs`` the data are stacked arrays; several inputs give a dict of tensors.
        """
        if isinstance(data, dict):
            tensors = {
                name: torch.as_tensor(array, device=self.device) for name, array in data.items()
            }
            return next(iter(tensors.values())) if len(tensors) == 1 else tensors
        values = [value_of(row) for row in data] if isinstance(data, list) else data
        try:
            return torch.as_tensor(values, device=self.device)
        except _NOT_NUMBERS:
            if isinstance(values, list):
                self.each_usable(_check_numbers, values)
            raise  # the requests are valid, but of different shapes

    @timed
    def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the model over a tensor of shape ``(requests, …)``, or over a dict of arguments."""
        with torch.inference_mode():
            if isinstance(data, dict):
                return self.model(*args, **data, **kwargs)
            return self.model(data.to(self.device), *args, **kwargs)

    @timed
    def postprocess(self, data: Any) -> Any:
        """Return the output tensor as nested lists; with ``stackInputs``, as it is."""
        config = yaml_config_of(self)  # a subclass may not set it
        return data if config.get("stackInputs") else data.tolist()

    def explain_handle(self, data_preprocess: Any, raw_data: Any) -> Any:
        """Return explanations of the class that the first request's ``target`` names."""
        row = raw_data[0]
        target = row.get("target") if isinstance(row, dict) else None
        if isinstance(target, str | bytes | bytearray):
            try:
                target = int(target)
            except ValueError as error:
                raise RefusedInputs({0: "target must be a whole number."}) from error
        return self.get_insights(data_preprocess, value_of(row), target or self.target)

    def get_insights(self, tensor_data: Any, inputs: Any, target: Any = 0) -> Any:
        """Return one explanation per request; here a PredictionException with status 501."""
        del tensor_data, inputs, target
        raise PredictionException(f"{type(self).__name__} gives no explanations", 501)

    @property
    def is_optimized(self) -> bool:
        """Whether `initialize` has applied the section ``optimization`` of model-config.yaml."""
        return self.__optimized_model is not None

    def describe_handle(self) -> Any:
        """Return the model's part of its description: here the optimizations."""
        optimized = self.__optimized_model
        return optimized and optimized.describe()

    def sample_input(self) -> Any:
        """Return a request body (bytes, str, or a value for JSON) for batches tried while loading.

        A tuple has several different ones, which ``validateBatching`` compares. None: only files
        that model-config.yaml names as ``sampleInput`` are tried.
        """
        return None

    def get_device(self) -> Any:
        """Return the device of the model."""
        return self.device

    # Called by `marserve.backend.pipeline`

    def overlap_obstacle(self) -> str:
        """Return the reason why stages of different batches cannot overlap, or an empty string."""
        kind = type(self)
        if kind.handle is not BaseHandler.handle or "handle" in vars(self):
            return f"{kind.__name__} overrides handle()"
        if self.stage_pipeline is not None:
            return f"{kind.__name__} has a stage_pipeline"
        if not isinstance(inspect.getattr_static(kind, "context"), BatchContext):
            return f"{kind.__name__} defines context as an attribute of the class"
        return ""

    def concurrent_inferences(self) -> int:
        """Return how many batches `inference` takes at a time: the number of ``device_stages``."""
        optimized = self.__optimized_model
        return max(1, len(optimized.options.device_stages)) if optimized is not None else 1

    def begin_overlapping(self) -> None:
        """Keep the context of each batch in its own thread from now on."""
        BatchContext.separate(self)

    def enter_stages(self, data: Any, context: Context) -> Steps | None:
        """Return the steps of a batch, one per stage; None if it has to run alone in `handle`."""
        self.context = context
        if self._is_describe() or self._is_explain() or is_profiling():
            return None
        return run_stages(self, self.__stages(), data, context, overlaps=True)

    leave_stages = staticmethod(finish)  # returns the answers, after the steps of all stages

    def each_usable(self, prepare: Callable[[Any], Any], data: Iterable[Any]) -> list[Any]:
        """Return ``prepare(request)`` for each request; for `preprocess`.

        Raises:
            RefusedInputs: ``prepare`` raised `UnusableInput` for some requests.
        """
        prepared: list[Any] = []
        refused: dict[int, str] = {}
        for index, row in enumerate(data):
            try:
                prepared.append(prepare(row))
            except UnusableInput as error:
                refused[index] = str(error)
        if refused:
            raise RefusedInputs(refused)
        return prepared

    def __predict(self, data: Any) -> Any:
        return finish(run_stages(self, self.__stages(), data, self.context))

    def __stages(self) -> tuple[str, ...]:
        if self._is_explain():
            return "preprocess", EXPLAIN
        return STAGES if self.stage_pipeline is None else ("stage_pipeline",)

    def _infer_with_profiler(self, data: Any) -> tuple[Any, Any]:
        name = self.__manifest_entry("modelName") or getattr(self.context, "model_name", "")
        directory = Path(tempfile.gettempdir(), "pytorch_profiler", name)
        on_ready = tensorboard_trace_handler(str(directory))
        defaults = {"record_shapes": True, "on_trace_ready": on_ready}
        with profile(**{**defaults, **self.profiler_args}) as profiler:
            output = self.__predict(data)
        table = profiler.key_averages().table(sort_by="cpu_time_total", row_limit=10)
        logger.info("%s", table)
        return output, profiler

    def _is_explain(self) -> bool:
        self.explain = self.__has_flag("explain")
        return self.explain

    def _is_describe(self) -> bool:
        return self.__has_flag("describe")

    def __has_flag(self, header: str) -> bool:
        # The first request decides for the batch.
        context = self.context
        return bool(context is not None and context.get_request_header(0, header) == "True")

    def __manifest_entry(self, key: str) -> str:
        return str(((self.manifest or {}).get("model") or {}).get(key) or "")

    def __load_model(self, model_dir: str) -> Any:
        model_file, path = self.__manifest_entry("modelFile"), self.model_pt_path
        if model_file:
            model = self._load_pickled_model(model_dir, model_file, path)
            return model.to(self.device).eval()
        if path is None:
            raise RuntimeError(
                f"{NOT_LOADED}: the archive has no serialized file; MAR-INF/MANIFEST.json names it "
                "(torch-model-archiver --serialized-file)"
            )
        match Path(path).suffix:
            case ".pt" | ".pth":
                return self._load_torchscript_model(path).eval()
            case ".pt2":
                return load_exported(path, self.device)
            case ".onnx":
                return load_onnx(path, self.map_location)
            case ".so":
                if self.__is_compiled_ahead():
                    return self._load_torch_export_aot_compile(path)
                reason = "needs pt2.export.aot_compile in model-config.yaml"
            case ".safetensors":
                reason = "contains only weights, which need the model's class (--model-file)"
            case _:
                reason = "has no supported format"
        raise RuntimeError(f"{NOT_LOADED}: {Path(path).name} {reason}")

    def _load_torchscript_model(self, model_pt_path: str) -> Any:
        if not is_torchscript(model_pt_path):
            raise RuntimeError(
                f"{NOT_LOADED}: {Path(model_pt_path).name} is not TorchScript, "
                "and a state dict needs the model's class (--model-file)"
            )
        return load_torchscript(model_pt_path, self.device)

    def _load_pickled_model(
        self, model_dir: str, model_file: str, model_pt_path: str | None
    ) -> Any:
        path = Path(model_dir, model_file)
        if not path.is_file():
            raise RuntimeError(f"Missing the model.py file: {path}")
        classes = list_classes_from_module(import_model_file(path))
        if len(classes) != 1:
            names = [each.__name__ for each in classes]
            raise ValueError(
                f"Expected only one class as model definition. {names}: {path.name} defines the "
                "model's class and imports others from files added with --extra-files"
            )
        if not model_pt_path:
            with explained(classes[0]):
                return classes[0]()
        # In a linked directory the author may overwrite the file, which would change the mapping.
        mapped = not Path(model_dir).is_symlink()
        make = made_in(read_optimization(self.model_yaml_config), classes[0])
        weights = load_state_dict(model_pt_path, mapped=mapped)
        with explained(classes[0], weights):
            model = make_with_weights(make, weights)
        is_chosen = "precision" in (self.model_yaml_config.get(SECTION) or {})
        if not is_chosen and (saved := raised_precision(model, weights)):
            sentence = (
                f"{Path(model_pt_path).name} has weights in {saved}, but the model runs in fp32: "
                f"set {SECTION}.precision to {saved}, or to fp32 to confirm it."
            )
            logger.warning("%s", sentence)
            load_warnings_of(self.context).append(sentence)
        return model

    def __is_compiled_ahead(self) -> bool:
        pt2 = self.model_yaml_config.get("pt2")
        export = pt2.get("export") if isinstance(pt2, dict) else None
        return bool((export or {}).get("aot_compile"))

    def _load_torch_export_aot_compile(self, model_so_path: str) -> Any:
        if self.map_location == "cuda":
            torch.cuda.set_device(self.device)
        return importlib.import_module("torch._export").aot_load(model_so_path, str(self.device))

    def __optimized(self, model: Any) -> Any:
        if self.__manifest_entry("modelFile"):
            optimized = optimize(model, self.context, self.device)
            if optimized is not None:
                self.__optimized_model = optimized
                # Copies of MockContext have no warm_ups.
                getattr(self.context, "warm_ups", []).append(optimized.warm_up)
                return optimized.model
        else:
            refuse_optimization(self.model_yaml_config)
            found = load_warnings_of(self.context)
            exported = {"by": "export", "file": Path(self.model_pt_path or "").name}
            if isinstance(model, ProgramForRows | SessionForRows):
                exported["rows"] = str(model.rows)
                size = self.context.system_properties.get("batch_size") or 1
                found += model.rows.warnings(exported["file"], size)
            self.context.describe_compiled = exported.copy
            is_for_rows, pt2 = isinstance(model, ProgramForRows), self.model_yaml_config.get("pt2")
            compiled = compile_model(model.program if is_for_rows else model, pt2, found)
            if compiled is not None:
                return ProgramForRows(compiled, model.rows) if is_for_rows else compiled
        return optimize_with_ipex(model)


def __getattr__(name: str) -> bool:
    """TorchServe's flags of optional packages, computed at each use."""
    match name:
        case "IPEX_AVAILABLE":
            return env_is_true("TS_IPEX_ENABLE") and is_installed("intel_extension_for_pytorch")
        case "XLA_AVAILABLE":
            return is_installed("torch_xla")
        case "ONNX_AVAILABLE":
            return is_installed("onnxruntime")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _check_numbers(value: Any) -> None:
    if isinstance(value, dict):
        raise UnusableInput(
            "The input has tensors by name, which the handler takes only with stackInputs: true in "
            "model-config.yaml."
        )
    try:
        torch.as_tensor(value)
    except _NOT_NUMBERS as error:
        reason = f"The input is not a number or nested lists of numbers: {error}"
        raise UnusableInput(reason) from error
