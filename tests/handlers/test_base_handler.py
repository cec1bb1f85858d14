import importlib.util
import os
import shutil
import sys
import tempfile
import types
import warnings
from functools import partial

import pytest
import torch

from marserve.backend.errors import PredictionException
from marserve.backend.metrics import MetricTypes
from marserve.handlers import base_handler
from marserve.handlers.base_handler import PROFILER_AVAILABLE, BaseHandler
from marserve.handlers.refusals import RefusedInputs, UnusableInput

MODEL_FILE = """
import torch

class Doubler(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor(2.0))

    def forward(self, x, plus=0):
        return x * self.factor + plus
"""


class Doubler(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return x * self.factor


@pytest.fixture
def eager(tmp_path, make_context):
    """A context for the model file above with a state dict of factor 3."""
    # Modules live as long as the process, so each test's model file has another name.
    model_file = f"model_{tmp_path.name}.py"
    (tmp_path / model_file).write_text(MODEL_FILE)
    torch.save({"factor": torch.tensor(3.0)}, tmp_path / "weights.bin")

    def make(**kwargs):
        return make_context(modelFile=model_file, serializedFile="weights.bin", **kwargs)

    return make


@pytest.fixture
def save_torchscript(tmp_path):
    def save(name):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.jit.save(torch.jit.script(Doubler()), tmp_path / name)

    return save


@pytest.fixture
def handler(eager):
    handler = BaseHandler()
    handler.initialize(eager())
    return handler


def test_the_attributes_of_a_new_handler():
    handler = BaseHandler()
    assert (handler.initialized, handler.explain, handler.target) == (False, False, 0)
    assert handler.profiler_args == {}
    for name in ("model", "mapping", "device", "context", "model_pt_path", "manifest"):
        assert getattr(handler, name) is None


def test_an_eager_model_is_loaded_with_its_weights(handler, eager, begin_batch):
    assert handler.initialized
    assert not handler.model.training
    assert handler.get_device() == torch.device("cpu")
    assert handler.map_location == "cpu"

    context = begin_batch(eager(), {}, {})
    assert handler.handle([{"body": [1.0]}, {"data": [2.0]}], context) == [[3.0], [6.0]]


def test_an_eager_model_without_weights(tmp_path, make_context):
    (tmp_path / "bare_model.py").write_text(MODEL_FILE)
    handler = BaseHandler()
    handler.initialize(make_context(modelFile="bare_model.py"))
    assert handler.model.factor.item() == 2.0


def test_a_state_dict_of_more_than_weights_is_loaded_with_a_warning(tmp_path, eager, caplog):
    handler, context = BaseHandler(), eager()
    torch.save(_Weights(factor=torch.tensor(3.0)), tmp_path / "weights.bin")
    handler.initialize(context)
    assert handler.model.factor.item() == 3.0
    assert "holds more than weights" in caplog.text


class _Weights(dict):
    """A mapping that torch does not count among plain weights."""


def test_an_imported_model_file_is_not_loaded_again(tmp_path, make_context):
    (tmp_path / "known_model.py").write_text(MODEL_FILE)
    sys.path.insert(0, str(tmp_path))
    try:
        import known_model
    finally:
        sys.path.remove(str(tmp_path))
    handler = BaseHandler()
    handler.initialize(make_context(modelFile="known_model.py"))
    assert isinstance(handler.model, known_model.Doubler)


@pytest.mark.parametrize("name", ["doubler.pt", "doubler.pth"])
def test_torchscript(name, save_torchscript, make_context, begin_batch):
    save_torchscript(name)
    handler = BaseHandler()
    context = make_context(serializedFile=name)
    handler.initialize(context)
    assert handler.handle([{"body": [1.5]}], begin_batch(context, {})) == [[3.0]]
    assert handler.model_pt_path.endswith(name)


@pytest.mark.parametrize("name", ["weights.pt", "weights.pth"])
def test_a_state_dict_without_its_class_has_a_reason(tmp_path, make_context, name):
    torch.save(Doubler().state_dict(), tmp_path / name)
    with pytest.raises(RuntimeError, match=f"No model weights.*{name} is not TorchScript"):
        BaseHandler().initialize(make_context(serializedFile=name))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("weights.safetensors", "needs? the model's class"),
        ("model.pt2", "not a usable exported program"),
        ("model.so", "aot_compile"),
        ("model.bin", "has no supported format"),
    ],
)
def test_unsupported_files_have_a_reason(tmp_path, make_context, name, reason):
    (tmp_path / name).write_bytes(b"?")
    with pytest.raises(RuntimeError, match=f"No model weights could be loaded: {name}.*{reason}"):
        BaseHandler().initialize(make_context(serializedFile=name))


def test_an_exported_program_of_a_fixed_batch_is_compiled_for_this_batch_only(
    tmp_path, make_context, begin_batch, compiler
):
    """Its pieces were compiled with it, up to torch's limit of recompilations."""
    program = torch.export.export(torch.nn.Tanh(), (torch.zeros(4, 1),))
    torch.export.save(program, tmp_path / "model.pt2")
    yaml = {"pt2": {"compile": {"backend": "eager"}}}
    handler, context = BaseHandler(), make_context(serializedFile="model.pt2", yaml=yaml)
    handler.initialize(context)
    for rows in (4, 1, 2, 3, 4, 5, 9):
        numbers = [[float(row)] for row in range(rows)]
        answers = handler.handle(
            [{"body": each} for each in numbers], begin_batch(context, *[{}] * rows)
        )
        torch.testing.assert_close(torch.tensor(answers), torch.tensor(numbers).tanh())
    assert compiler["stats"]["unique_graphs"] <= 2  # of inputs in and outside of inference mode


def test_an_exported_program(tmp_path, make_context, begin_batch):
    any_length = ({0: torch.export.Dim.DYNAMIC},)
    program = torch.export.export(Doubler(), (torch.ones(2, 1),), dynamic_shapes=any_length)
    torch.export.save(program, tmp_path / "model.pt2")
    handler, context = BaseHandler(), make_context(serializedFile="model.pt2")
    handler.initialize(context)
    rows = [{"body": [1.5]}, {"body": [2.0]}, {"body": [0.0]}]
    answers = handler.handle(rows, begin_batch(context, {}, {}, {}))
    assert answers == [[3.0], [4.0], [0.0]]


@pytest.mark.integration
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a compiler")
@pytest.mark.filterwarnings("default")
def test_a_library_compiled_ahead(tmp_path, make_context, begin_batch):
    any_length = ({0: torch.export.Dim.DYNAMIC},)
    program = torch.export.export(Doubler(), (torch.ones(2, 1),), dynamic_shapes=any_length)
    options = {"aot_inductor.output_path": str(tmp_path / "model.so")}
    torch._inductor.aot_compile(program.module(), (torch.ones(2, 1),), options=options)
    yaml = {"pt2": {"export": {"aot_compile": True}}}
    handler, context = BaseHandler(), make_context(serializedFile="model.so", yaml=yaml)
    handler.initialize(context)
    rows = [{"body": [1.5]}, {"body": [2.0]}, {"body": [0.0]}]
    answers = handler.handle(rows, begin_batch(context, {}, {}, {}))
    assert answers == [[3.0], [4.0], [0.0]]


def test_no_weights_at_all(make_context):
    with pytest.raises(RuntimeError, match=r"the archive has no serialized file.*MAR-INF/MANIFEST"):
        BaseHandler().initialize(make_context())


def test_onnx_without_onnxruntime(monkeypatch, make_context):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(RuntimeError, match=r"No model weights.*model.onnx needs onnxruntime"):
        BaseHandler().initialize(make_context(serializedFile="model.onnx"))


def test_a_missing_model_file(make_context):
    with pytest.raises(RuntimeError, match=r"Missing the model.py file.*nowhere.py"):
        BaseHandler().initialize(make_context(modelFile="nowhere.py"))


@pytest.mark.parametrize(("code", "names"), [("", r"\[\]"), (MODEL_FILE + "class B: ...", "'B'")])
def test_a_model_file_defines_one_class(tmp_path, make_context, code, names):
    name = f"model_{tmp_path.name}.py"
    (tmp_path / name).write_text(code)
    expected = rf"Expected only one class as model definition\. .*{names}.*: .*--extra-files"
    with pytest.raises(ValueError, match=expected):
        BaseHandler().initialize(make_context(modelFile=name))


@pytest.mark.parametrize("weights", ["", "weights.bin"])
def test_a_model_whose_constructor_needs_arguments_has_a_hint(tmp_path, make_context, weights):
    name = f"model_{tmp_path.name}.py"
    (tmp_path / name).write_text(MODEL_FILE.replace("__init__(self)", "__init__(self, width)", 1))
    torch.save(Doubler().state_dict(), tmp_path / "weights.bin")
    with pytest.raises(TypeError, match=r"argument: 'width'. .*without arguments.*default"):
        BaseHandler().initialize(make_context(modelFile=name, serializedFile=weights))


@pytest.mark.parametrize(
    ("saved", "hint"),
    [
        (
            {"epoch": 3, "model_state_dict": Doubler().state_dict(), "optimizer": {"state": {}}},
            r"Missing key.*The weights are under 'model_state_dict'.*torch\.save\(checkpoint\[",
        ),
        (Doubler(), r"dict-like.*whole model.*state_dict\(\)"),
    ],
)
def test_a_file_that_is_no_state_dict_has_a_hint(tmp_path, eager, saved, hint):
    torch.save(saved, tmp_path / "weights.bin")
    with pytest.raises((RuntimeError, TypeError), match=f"(?s){hint}"):
        BaseHandler().initialize(eager())


def test_weights_of_another_model_have_no_hint(tmp_path, eager):
    torch.save({"other": torch.tensor(3.0)}, tmp_path / "weights.bin")
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"other"\. $'):
        BaseHandler().initialize(eager())


def test_a_subclass_loads_other_formats(tmp_path, make_context):
    class Pickled(BaseHandler):
        def _load_torchscript_model(self, model_pt_path):
            return torch.load(model_pt_path, weights_only=False)

    torch.save(torch.nn.Linear(2, 2), tmp_path / "model.pt")
    handler = Pickled()
    handler.initialize(make_context(serializedFile="model.pt"))
    assert isinstance(handler.model, torch.nn.Linear)


def test_the_gpu_id_is_ignored_without_a_gpu(monkeypatch, eager):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    handler = BaseHandler()
    handler.initialize(eager(gpu=0))
    assert handler.device == torch.device("cpu")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu(eager, begin_batch):
    handler = BaseHandler()
    context = eager(gpu=0)
    handler.initialize(context)
    assert handler.model.factor.device == torch.device("cuda:0")
    assert handler.handle([{"body": [1.0]}], begin_batch(context, {})) == [[3.0]]


def test_class_names_are_read(tmp_path, eager):
    (tmp_path / "index_to_name.json").write_text('{"0": "tabby"}')
    handler = BaseHandler()
    handler.initialize(eager())
    assert handler.mapping == {"0": "tabby"}


class Picky(BaseHandler):
    """Refuses each request that is not a number."""

    def preprocess(self, data):
        return torch.tensor(self.each_usable(self._number_of, data))

    def _number_of(self, row):
        if not isinstance(row["body"], float):
            raise UnusableInput("not a number")
        return row["body"]


def test_a_request_is_refused_alone(eager, begin_batch):
    handler, context = Picky(), begin_batch(eager(), {}, {}, {})
    handler.initialize(context)
    answers = handler.handle([{"body": 1.0}, {"body": "?"}, {"body": 2.0}], context)
    assert [answers[0], answers[2]] == [3.0, 6.0]
    assert answers[1] == {"code": 400, "type": "BadRequestException", "message": "not a number"}
    assert [context.get_response_status(i)[0] for i in range(3)] == [200, 400, 200]


def test_rows_that_are_not_requests_are_refused_together(eager, begin_batch):
    handler, context = Picky(), begin_batch(eager(), {})
    handler.initialize(context)
    with pytest.raises(RefusedInputs, match="Request 1: not a number"):
        handler.handle([{"body": 1.0}, {"body": "?"}], context)


def test_inference_passes_arguments_on(handler):
    output = handler.inference(torch.tensor([1.0]), plus=1)
    assert output.tolist() == [4.0]
    assert not output.requires_grad


def test_handler_time_is_reported_per_batch(handler, eager, begin_batch):
    context = begin_batch(eager(), {}, {})
    handler.handle([{"body": [1.0]}, {"body": [2.0]}], context)
    [row] = context.metrics.drain()
    assert row[:3] == ["gauge", "HandlerTime", "Milliseconds"]
    assert row[5] == ["id-0", "id-1"]
    assert row[3] == round(row[3], 2)


def test_stages_report_their_times_if_configured(eager, begin_batch):
    context = begin_batch(eager(yaml={"handler": {"profile": True}}), {})
    handler = BaseHandler()
    handler.initialize(context)
    handler.handle([{"body": [1.0]}], context)
    for stage in ("preprocess", "inference", "postprocess"):
        context.metrics.get_metric(f"ts_handler_{stage}", MetricTypes.GAUGE)


def test_describe(handler, eager, begin_batch):
    assert handler.handle([{}], begin_batch(eager(), {"describe": "True"})) == [None]


class Explainer(BaseHandler):
    def get_insights(self, tensor_data, inputs, target=0):
        return [[tensor_data.tolist(), inputs, target]]


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        ({"body": [1.0]}, [[[1.0]], [1.0], 0]),
        ({"data": [2.0], "target": 3}, [[[2.0]], [2.0], 3]),
        ({"data": [2.0], "target": bytearray(b"281")}, [[[2.0]], [2.0], 281]),
    ],
)
def test_explain(eager, begin_batch, row, answer):
    handler = Explainer()
    handler.initialize(eager())
    assert handler.handle([row], begin_batch(eager(), {"explain": "True"})) == [answer]
    assert handler.explain


@pytest.mark.parametrize("target", [b"", b"x", "1e9"])
def test_an_invalid_target_is_answered_with_400(eager, begin_batch, target):
    handler, context = Explainer(), eager()
    handler.initialize(context)
    begin_batch(context, {"explain": "True"})
    [answer] = handler.handle([{"data": [2.0], "target": target}], context)
    assert (answer["code"], answer["message"]) == (400, "target must be a whole number.")


@pytest.mark.parametrize("value", [None, "text", [[1], [2, 3]], ["a"], [10**400]])
def test_a_request_without_numbers_is_refused_alone(handler, eager, begin_batch, value):
    context = eager()
    handler.initialize(context)
    begin_batch(context, {}, {}, {})
    rows = [{"body": [1.0]}, {"body": value}, {"body": [2.0]}]
    first, bad, last = handler.handle(rows, context)
    assert (first, last) == ([3.0], [6.0])
    assert bad["code"] == 400
    assert bad["message"].startswith("The input is not a number or nested lists of numbers: ")


@pytest.mark.parametrize("value", [{"a": 1}, {"inputs": [{"name": "x", "data": [1.0]}]}])
def test_the_refusal_of_tensors_by_name_names_the_option(handler, eager, begin_batch, value):
    context = eager()
    handler.initialize(context)
    begin_batch(context, {}, {})
    good, bad = handler.handle([{"body": [1.0]}, {"body": value}], context)
    assert (good, bad["code"]) == ([3.0], 400)
    assert "only with stackInputs: true in model-config.yaml" in bad["message"]


def test_numbers_of_different_shapes_fail_the_batch(handler, eager, begin_batch):
    context = eager()
    handler.initialize(context)
    begin_batch(context, {}, {})
    with pytest.raises(ValueError, match="expected sequence of length"):
        handler.handle([{"body": [1.0]}, {"body": [1.0, 2.0]}], context)


def test_a_handler_without_explanations_answers_501(handler, eager, begin_batch):
    with pytest.raises(PredictionException, match="BaseHandler gives no explanations : 501"):
        handler.handle([{"body": [1.0]}], begin_batch(eager(), {"explain": "True"}))


def test_the_profiler(monkeypatch, tmp_path, handler, eager, begin_batch, caplog):
    monkeypatch.setenv("ENABLE_TORCH_PROFILER", "1")
    handler.profiler_args = {
        "activities": [torch.profiler.ProfilerActivity.CPU],
        "on_trace_ready": torch.profiler.tensorboard_trace_handler(str(tmp_path / "trace")),
    }
    caplog.set_level("INFO")
    assert handler.handle([{"body": [1.0]}], begin_batch(eager(), {})) == [[3.0]]
    assert all(stage in caplog.text for stage in ("preprocess", "inference", "postprocess"))
    assert list((tmp_path / "trace").iterdir())


def test_the_profilers_trace_goes_to_a_directory_of_the_models_name(
    monkeypatch, tmp_path, handler, eager, begin_batch
):
    monkeypatch.setenv("ENABLE_TORCH_PROFILER", "1")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    handler.profiler_args = {"activities": [torch.profiler.ProfilerActivity.CPU]}
    handler.handle([{"body": [1.0]}], begin_batch(eager(), {}))
    assert list((tmp_path / "pytorch_profiler" / "kitten").iterdir())


def test_an_empty_variable_does_not_enable_the_profiler(
    monkeypatch, handler, eager, begin_batch, caplog
):
    monkeypatch.setenv("ENABLE_TORCH_PROFILER", "")
    caplog.set_level("INFO")
    assert handler.handle([{"body": [1.0]}], begin_batch(eager(), {})) == [[3.0]]
    assert "inference" not in caplog.text


class CopiedHandle(BaseHandler):
    """Has a `handle` like those that handlers copied from TorchServe."""

    def handle(self, data, context):
        self.context = context
        if os.environ.get("ENABLE_TORCH_PROFILER", None):
            if not PROFILER_AVAILABLE:
                raise RuntimeError("no profiler")
            output, _ = self._infer_with_profiler(data=data)
            return output
        if self._is_describe():
            return [self.describe_handle()]
        prepared = self.preprocess(data)
        if self._is_explain():
            return self.explain_handle(prepared, data)
        return self.postprocess(self.inference(prepared))

    def describe_handle(self):
        return "a copy"

    def get_insights(self, tensor_data, inputs, target=0):
        return [f"because of {target}"]


def test_a_handle_copied_from_torchserve(monkeypatch, eager, begin_batch, tmp_path):
    handler = CopiedHandle()
    handler.initialize(eager())
    row = {"body": [1.0], "target": 2}

    def ask(**headers):
        return handler.handle([row], begin_batch(eager(), headers))

    assert ask() == [[3.0]]
    assert ask(describe="True") == ["a copy"]
    assert ask(explain="True") == ["because of 2"]
    monkeypatch.setenv("ENABLE_TORCH_PROFILER", "1")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert ask() == [[3.0]]


class SkipsBase(BaseHandler):
    def __init__(self):
        self.mine = True


class SkipsBaseByMistake(BaseHandler):
    def __init__(self):
        super(BaseHandler, self).__init__()
        self.mine = True


@pytest.mark.parametrize("kind", [SkipsBase, SkipsBaseByMistake])
@pytest.mark.parametrize("profiled", [False, True])
def test_a_subclass_that_does_not_call_our_constructor(
    monkeypatch, eager, begin_batch, tmp_path, kind, profiled
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    if profiled:
        monkeypatch.setenv("ENABLE_TORCH_PROFILER", "1")
    handler = kind()
    handler.initialize(eager())
    assert handler.handle([{"body": [1.0]}], begin_batch(eager(), {})) == [[3.0]]
    assert (handler.mine, handler.explain, handler.target) == (True, False, 0)


def test_flags_of_packages_are_computed_at_first_use(monkeypatch):
    monkeypatch.setenv("TS_IPEX_ENABLE", "true")
    names = ("IPEX", "ONNX", "PROFILER", "PT2", "PT230", "XLA")
    found = {name: getattr(base_handler, f"{name}_AVAILABLE") for name in names}
    assert found == {
        "IPEX": importlib.util.find_spec("intel_extension_for_pytorch") is not None,
        "ONNX": importlib.util.find_spec("onnxruntime") is not None,
        "PROFILER": True,
        "PT2": True,
        "PT230": True,
        "XLA": importlib.util.find_spec("torch_xla") is not None,
    }
    with pytest.raises(AttributeError, match="no attribute 'MOON_AVAILABLE'"):
        _ = base_handler.MOON_AVAILABLE


class Crowded(BaseHandler):
    """Has helpers and attributes with names that subclasses use."""

    def initialize(self, context) -> None:
        super().initialize(context)
        self.pipeline = "own"

    def _predict(self, prompt):
        raise NotImplementedError

    _load_model = _run_stages = _refuse = _optimized = _has_flag = _predict_part = _predict


def test_helpers_of_a_subclass_may_have_any_name(eager, begin_batch):
    handler, context = Crowded(), eager()
    handler.initialize(context)
    assert handler.handle([{"body": [1.0]}], begin_batch(context, {})) == [[3.0]]


def test_pt2_of_another_type(eager):
    with pytest.raises(ValueError, match="pt2 should be str or dict"):
        BaseHandler().initialize(eager(yaml={"pt2": 2}))


def test_a_compiled_model_answers_the_same(eager, begin_batch):
    context = begin_batch(eager(yaml={"pt2": {"compile": {"backend": "eager"}}}), {})
    handler = BaseHandler()
    handler.initialize(context)
    assert isinstance(handler.model, torch._dynamo.OptimizedModule)
    assert handler.handle([{"body": [1.0]}], context) == [[3.0]]


@pytest.mark.parametrize(
    ("pt2", "reason"),
    [
        ("abacus", "'abacus' is not a supported backend"),
        ({"backend": "eager", "no_such_option": 1}, "torch.compile failed: TypeError"),
    ],
)
@pytest.mark.parametrize("form", ["eager", "torchscript"])
def test_a_model_that_cannot_be_compiled_is_served_uncompiled(
    eager, save_torchscript, make_context, form, pt2, reason
):
    save_torchscript("doubler.pt")
    make = {"eager": eager, "torchscript": partial(make_context, serializedFile="doubler.pt")}
    context, handler = make[form](yaml={"pt2": pt2}), BaseHandler()
    handler.initialize(context)
    assert not isinstance(handler.model, torch._dynamo.OptimizedModule)
    [warning] = context.load_warnings
    assert warning.startswith(f"pt2: served uncompiled: {reason}")


@pytest.mark.parametrize(
    ("dtype", "optimization", "count"),
    [
        (torch.float16, None, 1),
        (torch.bfloat16, {"channels_last": False}, 1),
        (torch.float16, {"precision": "fp16"}, 0),
        (torch.float16, {"precision": "fp32"}, 0),
        (torch.float32, None, 0),
    ],
)
def test_weights_that_are_raised_to_fp32_are_reported(tmp_path, eager, dtype, optimization, count):
    context = eager(yaml={"optimization": optimization})
    torch.save({"factor": torch.tensor(3.0, dtype=dtype)}, tmp_path / "weights.bin")
    BaseHandler().initialize(context)
    assert len(context.load_warnings) == count
    assert all("but the model runs in fp32" in sentence for sentence in context.load_warnings)


def test_ipex_optimises_if_enabled(monkeypatch, eager):
    ipex = types.ModuleType("intel_extension_for_pytorch")
    ipex.optimize = lambda model: ("optimised", model)
    monkeypatch.setitem(sys.modules, ipex.__name__, ipex)
    handler = BaseHandler()

    handler.initialize(eager())
    assert isinstance(handler.model, torch.nn.Module)

    monkeypatch.setenv("TS_IPEX_ENABLE", "true")
    handler.initialize(eager())
    assert handler.model[0] == "optimised"


def test_a_handler_without_a_manifest_has_no_weights(tmp_path, make_context):
    context = make_context()
    context.manifest = None
    with pytest.raises(RuntimeError, match="No model weights could be loaded"):
        BaseHandler().initialize(context)


def test_the_base_handler_has_no_sample():
    assert BaseHandler().sample_input() is None
