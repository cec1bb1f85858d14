import os
import sys
import types

import pytest
import torch

from marserve.handlers.model_files import import_model_file, is_torchscript, load_onnx


def test_a_file_that_is_no_zip_is_not_torchscript(tmp_path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(b"kitten")
    assert not is_torchscript(str(path))


def test_a_state_dict_is_not_torchscript(tmp_path) -> None:
    torch.save({}, tmp_path / "model.pt")
    assert not is_torchscript(str(tmp_path / "model.pt"))


@pytest.mark.parametrize(
    ("cuda", "providers"),
    [
        (False, ["CPUExecutionProvider"]),
        (True, ["CUDAExecutionProvider", "CPUExecutionProvider"]),
    ],
)
def test_onnx_sessions_use_all_cpus_and_the_gpu_if_there_is_one(
    monkeypatch, cuda, providers
) -> None:
    onnxruntime = types.ModuleType("onnxruntime")
    onnxruntime.SessionOptions = types.SimpleNamespace
    onnxruntime.InferenceSession = lambda path, **options: (path, options)
    monkeypatch.setitem(sys.modules, "onnxruntime", onnxruntime)

    path, options = load_onnx("model.onnx", cuda=cuda)

    assert (path, options["providers"]) == ("model.onnx", providers)
    assert options["sess_options"].intra_op_num_threads == os.cpu_count()


def test_a_model_file_is_imported_by_path_whatever_is_loaded_under_its_name(
    monkeypatch, tmp_path
) -> None:
    monkeypatch.setitem(sys.modules, "net", types.ModuleType("net"))
    (tmp_path / "net.py").write_text("class Net: ...")
    module = import_model_file(tmp_path / "net.py")
    assert module.Net.__module__ == "net"
    assert import_model_file(tmp_path / "net.py") is module


def test_a_model_file_that_is_not_python(tmp_path) -> None:
    with pytest.raises(ImportError, match="is not a Python file"):
        import_model_file(tmp_path / "model.txt")
