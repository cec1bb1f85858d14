"""Readers of model files: TorchScript, exported programs, state dicts, model files, ONNX."""

import functools
import importlib
import importlib.util
import inspect
import json
import logging
import os
import pickle
import sys
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from marserve.handlers.performance.program_rows import (
    ProgramForRows,
    Rows,
    SessionForRows,
    rows_of_package,
    rows_of_program,
    rows_of_session,
)

logger = logging.getLogger(__name__)

NOT_LOADED = "No model weights could be loaded"


def is_torchscript(path: str) -> bool:
    """Return whether a file is TorchScript; a state dict is a similar zip without constants."""
    return any(member.filename.endswith("constants.pkl") for member in _members(path))


def _members(path: str) -> list[zipfile.ZipInfo]:
    """Return the members of a zip file; none of another file."""
    if not zipfile.is_zipfile(path):
        return []
    with zipfile.ZipFile(path) as archive:
        return archive.infolist()


def load_torchscript(path: str, device: Any) -> Any:
    """Load a TorchScript module; RuntimeError if it is damaged or made for another torch."""
    with warnings.catch_warnings():
        # TorchScript is deprecated, which concerns the author of the archive, not the operator.
        warnings.filterwarnings("ignore", ".*torch.jit")
        return torch.jit.load(path, map_location=device)  # type: ignore[no-untyped-call]  # torch's


def load_exported(path: str, device: Any) -> Any:
    """Load a ``.pt2`` file, a program of torch.export or a package of AOTInductor."""
    try:
        if any("data/aotinductor/" in member.filename for member in _members(path)):
            _check_package_device(path, torch.device(device))
            index = torch.device(device).index
            placed = {} if index is None else {"device_index": index}
            package = importlib.import_module("torch._inductor").aoti_load_package(path, **placed)
            return _for_any_rows(package, rows_of_package(path))
        program = torch.export.load(path)
        if torch.device(device).type != "cpu":
            passes = importlib.import_module("torch.export.passes")
            program = passes.move_to_device_pass(program, device)
        return _for_any_rows(program.module(), rows_of_program(program))
    except Exception as error:  # hostile bytes raise anything
        name = Path(path).name
        raise RuntimeError(
            f"{NOT_LOADED}: {name} is not a usable exported program: {error}"
        ) from error


def _check_package_device(path: str, device: torch.device) -> None:
    """Raise RuntimeError for a package of another kind of device.

    Torch checks neither the package's device nor that of inputs: code for the CPU that reads the
    memory of a GPU ends the process.
    """
    with zipfile.ZipFile(path) as package:
        names = [name for name in package.namelist() if name.endswith("_metadata.json")]
        found = {json.loads(package.read(name)).get("AOTI_DEVICE_KEY") for name in names}
    if kinds := found - {None, device.type}:
        kind = ", ".join(sorted(kinds))
        raise RuntimeError(
            f"it was compiled for {kind}, but the worker is on {device}: compile it for "
            f"{device.type}, or set deviceType: {'cpu' if kind == 'cpu' else 'gpu'} in "
            "model-config.yaml"
        )


def _for_any_rows(program: Any, rows: Rows | None) -> Any:
    return program if rows is None else ProgramForRows(program, rows)


def load_state_dict(path: str, *, mapped: bool = True) -> Any:
    """Load a state dict from ``.safetensors`` or a pickle into CPU memory.

    With ``mapped`` the tensors may use the pages of the mapped file, which processes share until
    they write to them. Compressed pickles and those from before torch 1.6 cannot be mapped.
    """
    if Path(path).suffix != ".safetensors":
        kinds = {member.compress_type for member in _members(path)}
        return load_pickled(path, "cpu", mapped=mapped and kinds == {zipfile.ZIP_STORED})
    try:
        safetensors = importlib.import_module("safetensors.torch")
    except ImportError as error:
        raise RuntimeError(
            f"{NOT_LOADED}: {Path(path).name} needs the package safetensors"
        ) from error
    tensors = safetensors.load_file(path)  # maps the file
    return tensors if mapped else {name: tensor.clone() for name, tensor in tensors.items()}


@contextmanager
def explained(kind: type, weights: Any = None) -> Iterator[None]:
    """Append to the errors of a model's class or its weights what the author has to change."""
    try:
        yield
    except (RuntimeError, TypeError) as error:
        if hint := _hint(kind, weights):
            error.args = (f"{str(error).rstrip('. ')}. {hint}",)
        raise


def _hint(kind: type, weights: Any) -> str:
    try:
        inspect.signature(kind).bind()
    except TypeError:
        return f"{kind.__name__} is created without arguments: give each argument a default."
    except ValueError:  # a class that has no signature
        pass
    if isinstance(weights, torch.nn.Module):
        return "The file contains a whole model: save model.state_dict()."
    for name, part in weights.items() if isinstance(weights, Mapping) else ():
        if isinstance(part, Mapping) and all(map(torch.is_tensor, part.values())) and part:
            saved = f"torch.save(checkpoint[{name!r}], FILE)"
            return f"The weights are under {name!r} of a checkpoint: {saved} saves them alone."
    return ""


def load_pickled(path: str, device: Any, *, mapped: bool = False) -> Any:
    """Load a file of ``torch.save`` as plain data, or in full if it contains other objects."""
    load = functools.partial(torch.load, path, map_location=device, mmap=mapped)
    try:
        return load(weights_only=True)
    except pickle.UnpicklingError:
        # No new risk: the archive's Python code runs as well.
        logger.warning("%s holds more than weights; it is unpickled in full.", path)
    try:
        return load(weights_only=False)
    except ModuleNotFoundError as error:
        raise RuntimeError(
            f"{Path(path).name} holds objects of the package {error.name!r}, which is not installed"
        ) from error


def load_onnx(path: str, map_location: str | None) -> Any:
    """Open an onnxruntime session; RuntimeError if onnxruntime is not installed."""
    try:
        session = setup_ort_session(path, map_location)
    except ImportError as error:
        raise RuntimeError(f"{NOT_LOADED}: {Path(path).name} needs onnxruntime") from error
    rows = rows_of_session(session)
    return session if rows is None else SessionForRows(session, rows)


def setup_ort_session(model_pt_path: str, map_location: str | None) -> Any:
    """Open an onnxruntime session with as many threads as there are logical CPUs."""
    onnxruntime = importlib.import_module("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = os.cpu_count() or 1
    providers = ["CUDAExecutionProvider"] * (map_location == "cuda") + ["CPUExecutionProvider"]
    return onnxruntime.InferenceSession(model_pt_path, sess_options=options, providers=providers)


def import_model_file(path: Path) -> ModuleType:
    """Import a model file under its own name, which pickles contain, unless the handler has."""
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
