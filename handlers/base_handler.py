"""The handler that other handlers are made from: load a PyTorch model, run it over a batch.

A batch passes through three stages that a subclass may replace one by one:

    preprocess(list of requests) → inference(tensor) → postprocess(tensor) → list of answers

A request that cannot be used costs only itself its answer (400): `preprocess` says which requests
it refuses (`BaseHandler.each_usable`), and the batch is run again without them (`stage_run`). A
subclass's own `preprocess` and `postprocess` thus see only usable requests, just as under
TorchServe, and the context counts those. The price, preparing them twice, is paid only by a batch
that holds a refused one.

The stages of successive batches overlap, each in a thread of its own, where model-config.yaml asks
for it (``overlapStages``).

What kind of file the weights are in decides how they are loaded:

* a model file in the manifest    the class is imported; the state dict, a pickle or
                                  ``.safetensors``, is loaded into it
* ``.pt``, ``.pth``               TorchScript; TorchServe refused it under the second name
* ``.pt2``                        a program of torch.export, or a package of AOTInductor
* ``.onnx``                       an onnxruntime session; the subclass's `inference` has to call it
* ``.so``                         compiled ahead of time, where model-config.yaml says so

No other class may be defined here: "the one class of its module" is how the loader finds it.

Subclasses in the wild define helpers of any name (``_predict``, ``_load_model``, ``pipeline``), so
what TorchServe's class does not have is named with two underscores here, and cannot be met.
"""

import importlib
import importlib.util
import inspect
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function, tensorboard_trace_handler

from marserve.backend.context import Context
from marserve.backend.errors import PredictionException
from marserve.handlers.devices import (
    choose_device,
    env_is_true,
    is_installed,
    optimize_with_ipex,
)
from marserve.handlers.model_files import (
    NOT_LOADED,
    import_model_file,
    is_torchscript,
    load_exported,
    load_onnx,
    load_state_dict,
    load_torchscript,
    setup_ort_session,
)
from marserve.handlers.performance.optimization import read_optimization
from marserve.handlers.performance.optimized_model import (
    OptimizedModel,
    made_in,
    optimize,
    refuse_optimization,
)
from marserve.handlers.performance.stage_run import BatchContext, Stage, StageLabel, StageRun
from marserve.handlers.performance.torch_compile import compile_model
from marserve.handlers.performance.weights import make_with_weights
from marserve.handlers.refusals import RefusedInputs, UnusableInput
from marserve.handlers.timer import timed
from marserve.handlers.utils import (
    check_valid_pt2_backend,
    list_classes_from_module,
    load_label_mapping,
    value_of,
)

__all__ = [
    "BaseHandler",
    "ProfilerActivity",
    "check_valid_pt2_backend",
    "list_classes_from_module",
    "load_label_mapping",
    "profile",
    "record_function",
    "setup_ort_session",
    "timed",
]

logger = logging.getLogger(__name__)

STAGES = ("preprocess", "inference", "postprocess")

RunStages = Callable[[Any, StageLabel], Any]
"""Takes a batch through the three stages, each in the context that the label opens for it."""


class BaseHandler:
    """Loads a model and takes batches through `preprocess`, `inference` and `postprocess`."""

    # Here and not in `__init__`, because subclasses in the wild have one that does not call ours.
    context: Any = BatchContext()  # of the batch at hand
    stage_pipeline: RunStages | None = None  # None is one stage after the other
    model_pt_path: str | None = None  # the manifest's serialized file
    manifest: Any = None
    map_location: str | None = None  # kind of device, as torch.load takes it
    explain = False  # whether the batch at hand asks for explanations
    target: Any = 0  # the class they are about, where the request does not say
    profiler_args: Mapping[str, Any] = MappingProxyType({})  # for torch.profiler.profile
    __optimized_model: OptimizedModel | None = None

    def __init__(self) -> None:
        self.model: Any = None
        self.mapping: dict[str, str] | None = None  # class index to name: index_to_name.json
        self.device: Any = None  # where the model is
        self.context = None
        self.initialized = False
        self.profiler_args = {}

    def initialize(self, context: Context) -> None:
        """Choose the device, load the model, make it faster as asked, read the class names.

        Raises:
            OptionRefused: model-config.yaml asks for what cannot be done.
            RuntimeError: There are no weights, or none that can be loaded.
            ValueError: The model file defines no class, or several.
        """
        properties = context.system_properties
        model_dir = str(properties["model_dir"])
        self.context = context
        self.manifest = context.manifest
        self.model_yaml_config: dict[str, Any] = getattr(context, "model_yaml_config", None) or {}
        self.map_location, self.device = choose_device(properties.get("gpu_id"))
        serialized_file = self.__manifest_entry("serializedFile")
        if serialized_file:
            self.model_pt_path = str(Path(model_dir, serialized_file))
        self.model = self.__optimized(self.__load_model(model_dir))
        self.mapping = load_label_mapping(Path(model_dir, "index_to_name.json"))
        self.initialized = True

    def handle(self, data: Any, context: Context) -> Any:
        """Answer a batch, per request a dict of its parameters: a list with an element for each."""
        started = time.perf_counter()
        self.context = context
        if self._is_describe():
            output: Any = [self.describe_handle()]
        elif _is_profiling():
            output, _ = self._infer_with_profiler(data)
        else:
            output = self.__predict(data)
        _report_time(context, time.perf_counter() - started)
        return output

    @timed
    def preprocess(self, data: Any) -> Any:
        """Make one tensor of the requests' numbers, shape ``(requests, …)``.

        A request is a number or nested lists of numbers, as such or under ``data`` or ``body``.
        With ``stackInputs`` it is there already; of several inputs, a dict of tensors.

        Raises:
            RefusedInputs: There are requests that are something else; it says which.
        """
        if isinstance(data, dict):
            tensors = {
                name: torch.as_tensor(array, device=self.device) for name, array in data.items()
            }
            return next(iter(tensors.values())) if len(tensors) == 1 else tensors
        values = [value_of(row) for row in data] if isinstance(data, list) else data
        try:
            return torch.as_tensor(values, device=self.device)
        except (OverflowError, RuntimeError, TypeError, ValueError):
            if isinstance(values, list):
                self.each_usable(_check_numbers, values)
            raise  # each by itself is well, but they differ in their shapes

    @timed
    def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the model, without gradients, over a tensor of shape ``(requests, …)``.

        Tensors in a dict are its arguments, by name.
        """
        with torch.inference_mode():
            if isinstance(data, dict):
                return self.model(*args, **data, **kwargs)
            return self.model(data.to(self.device), *args, **kwargs)

    @timed
    def postprocess(self, data: Any) -> Any:
        """Make the list of answers of the model's output tensor.

        With ``stackInputs`` it is answered as it is, and cut into rows by the server.
        """
        return data if self.__is_stacking() else data.tolist()

    def explain_handle(self, data_preprocess: Any, raw_data: Any) -> Any:
        """Explain the answers of a batch, about the first request's ``target``.

        ``raw_data`` is the batch, ``data_preprocess`` what `preprocess` made of it.
        """
        row = raw_data[0]
        target = row.get("target") if isinstance(row, dict) else None
        if isinstance(target, str | bytes | bytearray):
            try:
                target = int(target)
            except ValueError as error:
                raise RefusedInputs({0: "target must be a whole number."}) from error
        return self.get_insights(data_preprocess, value_of(row), target or self.target)

    def get_insights(self, tensor_data: Any, inputs: Any, target: Any = 0) -> Any:
        """Explain the answers: one element per request. For subclasses that can.

        Raises:
            PredictionException: 501, this handler cannot.
        """
        del tensor_data, inputs, target
        raise PredictionException(f"{type(self).__name__} gives no explanations", 501)

    def describe_handle(self) -> Any:
        """Return what the model says of itself in its description; None is nothing.

        Here, what was done to make it faster, and what that cost in accuracy where it was asked.
        """
        optimized = self.__optimized_model
        return optimized and optimized.describe()

    def sample_input(self) -> Any:
        """Return an input such as clients send, to try batches with while the model loads.

        What a client would post as the body: bytes, a str, or what becomes JSON; a tuple of several
        different ones, where ``validateBatching`` is to compare them. None, nothing is tried out,
        unless model-config.yaml names files of the archive as ``sampleInput``.
        """
        return None

    def get_device(self) -> Any:
        """Return the device the model is on."""
        return self.device

    # Stages that overlap, as the worker asks for them (`marserve.backend.pipeline`)

    def overlap_obstacle(self) -> str:
        """Say why the stages of one batch cannot run beside those of others; empty if they can.

        Asked once the handler is initialised. What the stages keep on the handler itself nobody can
        see from here: whoever does that must not ask for it.
        """
        kind = type(self)
        if kind.handle is not BaseHandler.handle or "handle" in vars(self):
            return f"{kind.__name__} has a handle() of its own"
        if self.stage_pipeline is not None:
            return f"{kind.__name__} has a stage_pipeline of its own"
        if not isinstance(inspect.getattr_static(kind, "context"), BatchContext):
            return f"{kind.__name__} defines context as an attribute of the class"
        return ""

    def concurrent_inferences(self) -> int:
        """Say how many batches `inference` is called with at a time where stages overlap.

        One, in the main thread; but as many as the model has devices (``device_stages``).
        """
        optimized = self.__optimized_model
        return max(1, len(optimized.options.device_stages)) if optimized is not None else 1

    def begin_overlapping(self) -> None:
        """Called once, before the first batch."""
        BatchContext.separate(self)

    def enter_stages(self, data: Any, context: Context) -> StageRun | None:
        """Begin with a batch whose stages the caller will run, each in a thread of its own.

        The context is this batch's alone (`Context.for_batch`). None: `handle` has to answer this
        batch, while no other is under way.
        """
        self.context = context
        if self._is_describe() or self._is_explain() or _is_profiling():
            return None
        return StageRun(self, self.__stages(nullcontext), data, context, overlaps=True)

    def leave_stages(self, run: StageRun) -> Any:
        """Answer a batch that has been through all its stages: what `handle` returns."""
        answers = run.answers()  # first: till then the context shows the requests not refused
        _report_time(run.context, run.seconds)
        return answers

    def each_usable(self, prepare: Callable[[Any], Any], data: Iterable[Any]) -> list[Any]:
        """Prepare the requests one by one, for a `preprocess` whose requests fail alone.

        ``prepare`` raises `UnusableInput` for a request that it can make nothing of.

        Raises:
            RefusedInputs: There are unusable requests; it says which.
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

    def __predict(self, data: Any, label: StageLabel = nullcontext) -> Any:
        return StageRun(self, self.__stages(label), data, self.context, label).run()

    def __stages(self, label: StageLabel) -> list[Stage]:
        """What takes this batch to its answers."""
        if self._is_explain():
            return [self.__stage("preprocess"), Stage("explain", self.explain_handle)]
        if self.stage_pipeline is None:
            return [self.__stage(name) for name in STAGES]
        run = self.stage_pipeline
        return [Stage("stages", lambda data, _rows: run(data, label))]

    def __stage(self, name: str) -> Stage:
        return Stage(name, lambda value, _rows: getattr(self, name)(value))

    def _infer_with_profiler(self, data: Any) -> tuple[Any, Any]:
        """Give answers and profiler; the trace goes to a directory of the model's name."""
        name = self.__manifest_entry("modelName") or getattr(self.context, "model_name", "")
        directory = Path(tempfile.gettempdir(), "pytorch_profiler", name)
        usual = {
            "activities": [
                ProfilerActivity.CPU,
                *[ProfilerActivity.CUDA] * torch.cuda.is_available(),
            ],
            "record_shapes": True,
            "on_trace_ready": tensorboard_trace_handler(str(directory)),
        }
        with profile(**{**usual, **self.profiler_args}) as profiler:
            output = self.__predict(data, record_function)
        table = profiler.key_averages().table(sort_by="cpu_time_total", row_limit=10)
        logger.info("%s", table)
        return output, profiler

    def __is_stacking(self) -> bool:
        # A subclass may have an `initialize` of its own.
        return bool((getattr(self, "model_yaml_config", None) or {}).get("stackInputs"))

    def _is_explain(self) -> bool:
        self.explain = self.__has_flag("explain")
        return self.explain

    def _is_describe(self) -> bool:
        return self.__has_flag("describe")

    def __has_flag(self, header: str) -> bool:
        """Whether the first request, and with it the batch, is marked by the frontend."""
        context = self.context
        return bool(context is not None and context.get_request_header(0, header) == "True")

    # The model

    def __manifest_entry(self, key: str) -> str:
        return str(((self.manifest or {}).get("model") or {}).get(key) or "")

    def __load_model(self, model_dir: str) -> Any:
        model_file, path = self.__manifest_entry("modelFile"), self.model_pt_path
        if model_file:
            model = self._load_pickled_model(model_dir, model_file, path)
            return model.to(self.device).eval()
        if path is None:
            raise RuntimeError(f"{NOT_LOADED}: the archive has no serialized file")
        match Path(path).suffix:
            case ".pt" | ".pth":
                return self._load_torchscript_model(path).eval()
            case ".pt2":
                return load_exported(path, self.device)
            case ".onnx":
                return load_onnx(path, self.map_location)
            case ".so" if self.__is_compiled_ahead():
                return self._load_torch_export_aot_compile(path)
            case ".so":
                why = (
                    "is compiled code, which model-config.yaml declares with pt2.export.aot_compile"
                )
            case ".safetensors":
                why = "holds weights alone, which need the model's class (--model-file)"
            case _:
                why = "is in no format known here"
        raise RuntimeError(f"{NOT_LOADED}: {Path(path).name} {why}")

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
        """Make the eager model: its class from the model file, its weights from the state dict."""
        path = Path(model_dir, model_file)
        if not path.is_file():
            raise RuntimeError(f"Missing the model.py file: {path}")
        classes = list_classes_from_module(import_model_file(path))
        if len(classes) != 1:
            names = [each.__name__ for each in classes]
            raise ValueError(f"Expected only one class as model definition. {names}")
        if not model_pt_path:
            return classes[0]()
        # Who links a directory works in it: a file saved anew would be changed under the mapping.
        mapped = not Path(model_dir).is_symlink()
        make = made_in(read_optimization(self.model_yaml_config), classes[0])
        return make_with_weights(make, lambda: load_state_dict(model_pt_path, mapped=mapped))

    def __is_compiled_ahead(self) -> bool:
        pt2 = self.model_yaml_config.get("pt2")
        export = pt2.get("export") if isinstance(pt2, dict) else None
        return bool((export or {}).get("aot_compile"))

    def _load_torch_export_aot_compile(self, model_so_path: str) -> Any:
        if self.map_location == "cuda":
            torch.cuda.set_device(self.device)
        return importlib.import_module("torch._export").aot_load(model_so_path, str(self.device))

    def __optimized(self, model: Any) -> Any:
        if not self.__manifest_entry("modelFile"):
            refuse_optimization(self.model_yaml_config)
            compiled = compile_model(model, self.model_yaml_config.get("pt2"))
            return optimize_with_ipex(model) if compiled is None else compiled
        optimized = optimize(model, self.context, self.device)
        if optimized is None:
            return optimize_with_ipex(model)
        self.__optimized_model = optimized
        warm_ups = getattr(self.context, "warm_ups", None)  # a context made by hand has none
        if warm_ups is not None:
            warm_ups.append(optimized.warm_up)
        return optimized.model


def __getattr__(name: str) -> bool:
    """What is available, as TorchServe's module says it; looked at when it is asked for."""
    if name in _AVAILABLE:
        return _AVAILABLE[name]()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_AVAILABLE: dict[str, Callable[[], bool]] = {
    "PROFILER_AVAILABLE": lambda: True,  # these three: with every torch that is supported
    "PT2_AVAILABLE": lambda: True,
    "PT230_AVAILABLE": lambda: True,
    "IPEX_AVAILABLE": lambda: (
        env_is_true("TS_IPEX_ENABLE") and is_installed("intel_extension_for_pytorch")
    ),
    "XLA_AVAILABLE": lambda: is_installed("torch_xla"),
    "ONNX_AVAILABLE": lambda: is_installed("onnxruntime"),
}


def _is_profiling() -> bool:
    return bool(os.environ.get("ENABLE_TORCH_PROFILER"))


def _report_time(context: Context, seconds: float) -> None:
    if context.metrics is not None:
        context.metrics.add_time("HandlerTime", round(seconds * 1000, 2))


def _check_numbers(value: Any) -> None:
    try:
        torch.as_tensor(value)
    except (OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise UnusableInput(
            f"The input is no number and no nested lists of them: {error}"
        ) from error
