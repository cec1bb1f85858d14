import os
import shutil
import sys
import types
import zipfile

import pytest
import torch

from marserve.handlers.model_files import (
    import_model_file,
    is_torchscript,
    load_exported,
    load_onnx,
    load_pickled,
    load_state_dict,
    setup_ort_session,
)


def test_a_file_other_than_zip_is_not_torchscript(tmp_path):
    path = tmp_path / "model.pt"
    path.write_bytes(b"kitten")
    assert not is_torchscript(str(path))


def test_a_state_dict_is_not_torchscript(tmp_path):
    torch.save({}, tmp_path / "model.pt")
    assert not is_torchscript(str(tmp_path / "model.pt"))


@pytest.mark.parametrize(
    ("cuda", "providers"),
    [
        (False, ["CPUExecutionProvider"]),
        (True, ["CUDAExecutionProvider", "CPUExecutionProvider"]),
    ],
)
def test_onnx_sessions_use_all_cpus_and_the_gpu_if_there_is_one(monkeypatch, cuda, providers):
    onnxruntime = types.ModuleType("onnxruntime")
    onnxruntime.SessionOptions = types.SimpleNamespace
    onnxruntime.InferenceSession = lambda path, **options: (path, options)
    monkeypatch.setitem(sys.modules, "onnxruntime", onnxruntime)

    path, options = setup_ort_session("model.onnx", "cuda" if cuda else "cpu")

    assert (path, options["providers"]) == ("model.onnx", providers)
    assert options["sess_options"].intra_op_num_threads == os.cpu_count()


@pytest.mark.parametrize("size", ["n", 1, 2, 4])
@pytest.mark.parametrize("rows", [1, 2, 3, 8])
def test_an_onnx_session(tmp_path, size, rows):
    onnx, _ = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    numbers = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [size, 2])
        for name in ("x", "y")
    ]
    add = onnx.helper.make_node("Add", ["x", "x"], ["y"])
    graph = onnx.helper.make_graph([add], "doubler", numbers[:1], numbers[1:])
    model = onnx.helper.make_model(
        graph, ir_version=8, opset_imports=[onnx.helper.make_opsetid("", 13)]
    )
    onnx.save(model, tmp_path / "model.onnx")
    session = load_onnx(str(tmp_path / "model.onnx"), "cpu")
    assert session.get_inputs()[0].name == "x"
    numbers = [[float(row), 2.0] for row in range(rows)]
    [answer] = session.run(["y"], {"x": torch.tensor(numbers).numpy()})
    assert answer.tolist() == [[2 * row, 4.0] for row, _ in numbers]


def test_a_model_file_is_imported_by_path_beside_a_module_of_that_name(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "net", types.ModuleType("net"))
    (tmp_path / "net.py").write_text("class Net: ...")
    module = import_model_file(tmp_path / "net.py")
    assert module.Net.__module__ == "net"
    assert import_model_file(tmp_path / "net.py") is module


def test_a_model_file_that_is_not_python(tmp_path):
    with pytest.raises(ImportError, match="is not a Python file"):
        import_model_file(tmp_path / "model.txt")


class Tripler(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor(3.0))

    def forward(self, x):
        return x * self.factor


@pytest.fixture
def program():
    any_length = ({0: torch.export.Dim.DYNAMIC},)
    return torch.export.export(Tripler(), (torch.ones(2, 1),), dynamic_shapes=any_length)


def test_an_exported_program(tmp_path, program):
    torch.export.save(program, tmp_path / "model.pt2")
    model = load_exported(str(tmp_path / "model.pt2"), torch.device("cpu"))
    with torch.inference_mode():
        assert model(torch.ones(5, 1)).tolist() == [[3.0]] * 5


def test_an_exported_program_moves_to_the_device(tmp_path, program):
    torch.export.save(program, tmp_path / "model.pt2")
    model = load_exported(str(tmp_path / "model.pt2"), torch.device("meta"))
    assert {item.device.type for item in model.parameters()} == {"meta"}


@pytest.mark.integration
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a compiler")
@pytest.mark.filterwarnings("default")
def test_a_package_of_aotinductor(tmp_path, program):
    path = str(tmp_path / "model.pt2")
    torch._inductor.aoti_compile_and_package(program, package_path=path)
    model = load_exported(path, torch.device("cpu"))
    assert model(torch.ones(5, 1)).tolist() == [[3.0]] * 5
    with pytest.raises(RuntimeError, match=r"compiled for cpu, .* on cuda:0: .* deviceType: cpu"):
        load_exported(path, torch.device("cuda:0"))  # it ended the process with a GPU


@pytest.mark.parametrize("content", [b"", b"kitten", b"PK\x05\x06" + bytes(18)])
def test_other_files_are_not_exported_programs(tmp_path, content):
    (tmp_path / "model.pt2").write_bytes(content)
    with pytest.raises(RuntimeError, match=r"No model weights.*model\.pt2 is not a usable"):
        load_exported(str(tmp_path / "model.pt2"), torch.device("cpu"))


def test_safetensors_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(RuntimeError, match=r"weights\.safetensors needs the package safetensors"):
        load_state_dict("weights.safetensors")


def test_safetensors(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file({"factor": torch.tensor(4.0)}, tmp_path / "weights.safetensors")
    model = Tripler()
    model.load_state_dict(load_state_dict(str(tmp_path / "weights.safetensors")))
    assert model.factor.item() == 4.0


def test_a_pickle_from_before_torch_1_6(tmp_path):
    path = tmp_path / "weights.pth"
    torch.save({"factor": torch.tensor(4.0)}, path, _use_new_zipfile_serialization=False)
    assert load_state_dict(str(path))["factor"].item() == 4.0


def test_a_pickle_that_was_compressed_afterwards(tmp_path):
    torch.save({"factor": torch.arange(99.0)}, tmp_path / "stored.pth")
    path = tmp_path / "weights.pth"
    with (
        zipfile.ZipFile(tmp_path / "stored.pth") as stored,
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as compressed,
    ):
        for name in stored.namelist():
            compressed.writestr(name, stored.read(name))
    assert load_state_dict(str(path))["factor"].tolist() == list(range(99))


def test_a_pickle_of_a_missing_package_names_it(tmp_path, monkeypatch):
    module = types.ModuleType("package_of_old")
    module.Weights = type("Weights", (dict,), {"__module__": module.__name__})
    monkeypatch.setitem(sys.modules, module.__name__, module)
    torch.save(module.Weights(), tmp_path / "weights.pth")
    monkeypatch.delitem(sys.modules, module.__name__)
    with pytest.raises(RuntimeError, match=r"weights\.pth holds objects .*'package_of_old'"):
        load_pickled(str(tmp_path / "weights.pth"), "cpu")
