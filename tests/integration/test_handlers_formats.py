"""Archives in every form that BaseHandler loads, each served by a real worker."""

import shutil
import warnings

import pytest

pytestmark = pytest.mark.integration

torch = pytest.importorskip("torch")

MODEL_FILE = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, x):
        return self.layer(x)
"""
ONNX_HANDLER = """
from ts.torch_handler.base_handler import BaseHandler

class Session(BaseHandler):
    def inference(self, data):
        [output] = self.model.run(None, {"x": data.cpu().numpy()})
        return output
"""


class Net(torch.nn.Module):
    """Ten times the first number, the second, and a half."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.layer.weight = torch.nn.Parameter(torch.tensor([[10.0, 1.0]]))
        self.layer.bias = torch.nn.Parameter(torch.tensor([0.5]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def save_state_dict(path) -> None:
    torch.save(Net().state_dict(), path)


def save_safetensors(path) -> None:
    pytest.importorskip("safetensors.torch").save_file(Net().state_dict(), path)


def save_torchscript(path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.script(Net()).save(str(path))


def exported():
    any_length = ({0: torch.export.Dim.DYNAMIC},)
    return torch.export.export(Net(), (torch.ones(3, 2),), dynamic_shapes=any_length)


def save_program(path) -> None:
    torch.export.save(exported(), path)


def save_package(path, program=None) -> None:
    if shutil.which("g++") is None:
        pytest.skip("needs a compiler")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch._inductor.aoti_compile_and_package(program or exported(), package_path=str(path))


def save_fixed_program(path) -> None:
    torch.export.save(torch.export.export(Net(), (torch.ones(4, 2),)), path)


def save_fixed_package(path) -> None:
    save_package(path, torch.export.export(Net(), (torch.ones(4, 2),)))


def save_library(path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("needs a compiler")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch._inductor.aot_compile(
            exported().module(),
            (torch.ones(3, 2),),
            options={"aot_inductor.output_path": str(path)},
        )


def save_onnx(path, rows="n") -> None:
    onnx, _ = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    helper, net = onnx.helper, Net()
    weights = [
        onnx.numpy_helper.from_array(net.layer.weight.detach().numpy(), "weight"),
        onnx.numpy_helper.from_array(net.layer.bias.detach().numpy(), "bias"),
    ]
    x, y = (
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [rows, width])
        for name, width in (("x", 2), ("y", 1))
    )
    node = helper.make_node("Gemm", ["x", "weight", "bias"], ["y"], transB=1)
    graph = helper.make_graph([node], "net", [x], [y], weights)
    model = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 13)])
    onnx.save(model, path)


def save_fixed_onnx(path) -> None:
    save_onnx(path, 4)


ON_CPU = "deviceType: cpu"  # code that is compiled for the CPU needs it on a machine with a GPU
AHEAD = f"{ON_CPU}\npt2: {{export: {{aot_compile: true}}}}"
COMPILED = "pt2: {compile: {enable: true, backend: eager}}"
FORMS = {
    "eager": (save_state_dict, "net.pth", {"model_file": MODEL_FILE}, ""),
    "compiled": (save_state_dict, "net.bin", {"model_file": MODEL_FILE}, COMPILED),
    "safetensors": (save_safetensors, "net.safetensors", {"model_file": MODEL_FILE}, ""),
    "torchscript-pt": (save_torchscript, "net.pt", {}, ""),
    "torchscript-pth": (save_torchscript, "net.pth", {}, ""),
    "exported-program": (save_program, "net.pt2", {}, ""),
    "aotinductor-package": (save_package, "net.pt2", {}, ON_CPU),
    "aotinductor-library": (save_library, "net.so", {}, AHEAD),
    "onnx": (save_onnx, "net.onnx", {}, ""),
}


@pytest.fixture(scope="module")
def server(start_server):
    with start_server(preload_modules="torch") as server:
        yield server
        # What the libraries' loaders leave behind when their process ends.
        for folder in server.temp.glob("*inductor_*"):
            shutil.rmtree(folder)
        (server.temp / ".ses").unlink(missing_ok=True)  # onnxruntime's


@pytest.mark.parametrize("form", FORMS)
def test_a_model_in_this_form_answers(server, make_archive, tmp_path, together, form):
    save, file_name, files, config = FORMS[form]
    save(tmp_path / file_name)
    if "model_file" in files:
        (tmp_path / "net.py").write_text(files["model_file"])
        files = {"model_file": str(tmp_path / "net.py")}
    handler = ONNX_HANDLER if form == "onnx" else "base_handler"
    archive = make_archive(
        server.store, handler, form, config, serialized_file=str(tmp_path / file_name), **files
    )
    query = {"initial_workers": 1, "batch_size": 2, "max_batch_delay": 60_000}
    registered = server.register(archive, **query)
    assert registered.status_code == 200, registered.text

    def ask(*numbers):
        answer = server.predict(form, json=numbers)
        assert answer.status_code == 200, answer.text
        return answer.json()

    answers = together([lambda: ask(1.0, 2.0), lambda: ask(0.0, -1.0)])
    assert answers == [[12.5], [-0.5]]
    described = server.describe(form)
    assert "warnings" not in described
    if "model_file" not in files:
        compiled = described["workers"][0]["compiled"]
        assert compiled == {"by": "export", "file": file_name}
    assert server.management("DELETE", f"/models/{form}").status_code == 200


@pytest.mark.parametrize(
    ("save", "file", "handler"),
    [
        (save_fixed_program, "net.pt2", "base_handler"),
        (save_fixed_package, "net.pt2", "base_handler"),
        (save_fixed_onnx, "net.onnx", ONNX_HANDLER),
    ],
)
def test_a_program_of_a_fixed_batch_answers(
    server, make_archive, tmp_path, together, save, file, handler
):
    save(tmp_path / file)
    files = {"serialized_file": str(tmp_path / file)}
    archive = make_archive(server.store, handler, "fixed", ON_CPU, **files)
    query = {"initial_workers": 1, "batch_size": 2, "max_batch_delay": 60_000}
    [warning] = server.register(archive, **query).json()["warnings"]
    assert warning.startswith(f"{file} was exported for batches of 4, but batchSize is 2")

    def ask(*numbers):
        return server.predict("fixed", json=numbers).json()

    assert together([lambda: ask(1.0, 2.0), lambda: ask(0.0, -1.0)]) == [[12.5], [-0.5]]
    described = server.describe("fixed")
    assert described["warnings"] == [warning]
    assert described["workers"][0]["compiled"]["rows"] == "4"
    changed = server.management("PUT", "/models/fixed?batch_size=1&max_batch_delay=0")
    assert changed.status_code == 200
    assert ask(1.0, 0.0) == [10.5]
    assert server.management("DELETE", "/models/fixed").status_code == 200


def test_what_a_worker_cannot_serve_as_configured_is_listed(server, make_archive, tmp_path):
    weights, model = tmp_path / "net.pth", tmp_path / "net.py"
    torch.save(Net().half().state_dict(), weights)
    model.write_text(MODEL_FILE)
    files = {"serialized_file": str(weights), "model_file": str(model)}
    config = "pt2: {compile: {backend: abacus}}"
    archive = make_archive(server.store, "base_handler", "listed", config, **files)
    registered = server.register(archive, initial_workers=2, synchronous="true")
    raised, uncompiled = registered.json()["warnings"]
    assert raised.startswith("net.pth has weights in fp16, but the model runs in fp32")
    assert uncompiled == "pt2: served uncompiled: 'abacus' is not a supported backend."
    described = server.describe("listed")
    assert described["warnings"] == [raised, uncompiled]
    assert f"pt2: {described['workers'][0]['compiled']['fallback']}" == uncompiled
    assert server.management("DELETE", "/models/listed").status_code == 200
