"""The files a model is made of: TorchScript or not, exported, state dict, model file, ONNX."""

import functools
import importlib
import importlib.util
import logging
import os
import pickle
import sys
import warnings
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

logger = logging.getLogger(__name__)

NOT_LOADED = "No model weights could be loaded"
"""How the sentence begins that says why."""


def is_torchscript(path: str) -> bool:
    """Tell TorchScript from a state dict, which is the same kind of zip without constants."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return any(name.endswith("constants.pkl") for name in archive.namelist())


def load_torchscript(path: str, device: Any) -> Any:
    """Load a TorchScript module; RuntimeError if it is damaged, or made for another torch."""
    with warnings.catch_warnings():
        # TorchScript is on its way out: news for who made the archive, not for who serves it.
        warnings.filterwarnings("ignore", ".*torch.jit", category=FutureWarning)
        return torch.jit.load(path, map_location=device)  # type: ignore[no-untyped-call]  # torch's


def load_exported(path: str, device: Any) -> Any:
    """Load a ``.pt2`` file: a program of torch.export, or a package of AOTInductor.

    A package runs on the kind of device it was compiled for. A program is moved to ``device``. Of
    either, batches have the sizes it was exported for: export it with a dynamic first dimension.

    Raises:
        RuntimeError: It is neither, is damaged, or was made for another torch or device.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            is_compiled = any("data/aotinductor/" in name for name in archive.namelist())
        if is_compiled:
            index = torch.device(device).index
            placed = {} if index is None else {"device_index": index}
            return importlib.import_module("torch._inductor").aoti_load_package(path, **placed)
        program = torch.export.load(path)
        if torch.device(device).type != "cpu":
            passes = importlib.import_module("torch.export.passes")
            program = passes.move_to_device_pass(program, device)
        return program.module()
    except Exception as error:  # a reader of foreign files fails with every kind of error
        name = Path(path).name
        raise RuntimeError(
            f"{NOT_LOADED}: {name} is no usable exported program: {error}"
        ) from error


def load_state_dict(path: str, *, mapped: bool = True) -> Any:
    """Load a state dict, from ``.safetensors`` or a pickle, into memory of the CPU.

    With ``mapped``, for a file that nobody writes to, its tensors may lie in the mapped file: all
    who map it share its pages; those a process writes to become its own. A pickle from before
    torch 1.6, or one that is compressed, is read all the same.

    Raises:
        RuntimeError: A package that it needs is not installed.
    """
    if Path(path).suffix != ".safetensors":
        return load_pickled(path, "cpu", mapped=mapped and _is_mappable(path))
    try:
        safetensors = importlib.import_module("safetensors.torch")
    except ImportError as error:
        raise RuntimeError(
            f"{NOT_LOADED}: {Path(path).name} needs the package safetensors"
        ) from error
    tensors = safetensors.load_file(path)  # which maps
    return tensors if mapped else {name: tensor.clone() for name, tensor in tensors.items()}


def _is_mappable(path: str) -> bool:
    """Whether a pickle's tensors lie in it as they are."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return all(member.compress_type == zipfile.ZIP_STORED for member in archive.infolist())


def load_pickled(path: str, device: Any, *, mapped: bool = False) -> Any:
    """Load what ``torch.save`` wrote: as plain data, or in full where it holds more than that.

    Raises:
        RuntimeError: It holds objects of a package that is not installed.
    """
    load = functools.partial(torch.load, path, map_location=device, mmap=mapped)
    try:
        return load(weights_only=True)
    except pickle.UnpicklingError:
        # The archive brings Python code that runs anyway, so its pickle adds no power to it.
        logger.warning("%s holds more than weights; it is unpickled in full.", path)
    try:
        return load(weights_only=False)
    except ModuleNotFoundError as error:
        raise RuntimeError(
            f"{Path(path).name} holds objects of the package {error.name!r}, which is not installed"
        ) from error


def load_onnx(path: str, map_location: str | None) -> Any:
    """Open an onnxruntime session; RuntimeError where onnxruntime is not installed."""
    try:
        return setup_ort_session(path, map_location)
    except ImportError as error:
        raise RuntimeError(f"{NOT_LOADED}: {Path(path).name} needs onnxruntime") from error


def setup_ort_session(model_pt_path: str, map_location: str | None) -> Any:
    """Open an onnxruntime session with as many threads as there are logical CPUs."""
    onnxruntime = importlib.import_module("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = os.cpu_count() or 1
    providers = ["CUDAExecutionProvider"] * (map_location == "cuda") + ["CPUExecutionProvider"]
    return onnxruntime.InferenceSession(model_pt_path, sess_options=options, providers=providers)


def import_model_file(path: Path) -> ModuleType:
    """Import a model file under its own name, which pickles of its classes refer to.

    By path: another module of that name may be loaded already. Not twice: the handler may have
    imported the file itself.

    Raises:
        ImportError: It is not a Python file, or an import inside it failed.
    """
    known = sys.modules.get(path.stem)
    file = getattr(known, "__file__", None)
    if known is not None and file is not None and Path(file).exists() and path.samefile(file):
        return known
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
