"""``--precision``: cast the weights in the archive to bf16 or fp16.

`optimization.precision` of model-config.yaml does the same in each worker at the load. A cast at
packing halves the archive, and workers share the mapped weights. Only state dicts can be cast,
pickled or ``.safetensors``: TorchScript and exported programs have types in their code. Pickles are
read with ``weights_only``. Source files are not changed.
"""

import contextlib
import json
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from marserve.tools.archiver.config import ModelArchiverConfig
from marserve.tools.archiver.members import ModelArchiverError

if TYPE_CHECKING:
    import torch

_CONFIG_FILE = "model-config.yaml"
_SECTION = "optimization"
_MEASURE_SECONDS = 600


@dataclass(frozen=True)
class Cast:
    """The configuration with the cast files, and a sentence about their sizes."""

    config: ModelArchiverConfig
    report: str


@contextlib.contextmanager
def cast(config: ModelArchiverConfig) -> Iterator[Cast]:
    """Write the cast weights and model-config.yaml to temporary files, removed at the exit.

    Raises:
        ModelArchiverError: The weights cannot be cast, or the configuration contradicts.
        FileNotFoundError: A source file does not exist.
    """
    assert config.precision is not None
    if not (config.serialized_file and config.model_file):
        raise ModelArchiverError(
            "--precision needs a state dict (--serialized-file) and the class it belongs to "
            "(--model-file): code that was saved with its weights contains fixed types."
        )
    source = Path(config.serialized_file)
    settings = _settings(config.config_file, config.precision)
    with tempfile.TemporaryDirectory(prefix="marserve-pack-") as directory:
        weights = Path(directory, source.name)
        _cast_file(source, weights, config.precision)
        name = Path(config.config_file).name if config.config_file else _CONFIG_FILE
        configuration = Path(directory, "config", name)
        configuration.parent.mkdir()
        configuration.write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
        sizes = " -> ".join(f"{path.stat().st_size:,} bytes" for path in (source, weights))
        changed = replace(
            config,
            serialized_file=str(weights),
            config_file=str(configuration),
            precision=None,
        )
        yield Cast(changed, f"{source.name} in {config.precision}: {sizes}.")


def _settings(config_file: str | None, precision: str) -> dict[str, Any]:
    try:
        settings = yaml.safe_load(Path(config_file).read_text("utf-8")) if config_file else None
    except OSError:
        raise
    except Exception as error:  # PyYAML raises many kinds
        raise ModelArchiverError(f"{config_file} is not YAML: {error}") from error
    settings = {} if settings is None else settings
    section = settings.setdefault(_SECTION, {}) if isinstance(settings, dict) else None
    if not isinstance(section, dict):
        raise ModelArchiverError(f"{config_file} is not a mapping, or its {_SECTION} is not one.")
    if section.setdefault("precision", precision) != precision:
        raise ModelArchiverError(
            f"--precision {precision} contradicts {_SECTION}.precision of {config_file}, "
            f"{section['precision']!r}."
        )
    if section.get("cast") == "matmul":
        raise ModelArchiverError(
            f"--precision casts all weights; {_SECTION}.cast: matmul of {config_file} keeps "
            "those of norms in fp32. Leave out --precision to cast at the load of the model."
        )
    return settings


def _cast_file(source: Path, target: Path, precision: str) -> None:
    import torch

    from marserve.handlers.model_files import is_torchscript

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    if source.suffix == ".safetensors":
        from safetensors import SafetensorError, safe_open
        from safetensors.torch import save_file

        try:
            with safe_open(source, framework="pt") as file:
                held = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
                save_file(_lowered(held, dtype), target, file.metadata())
        except SafetensorError as error:
            raise ModelArchiverError(f"{source} cannot be cast: {error}") from error
        return
    if is_torchscript(str(source)):
        raise ModelArchiverError(
            f"{source} cannot be cast: it is TorchScript, whose code has fixed types. Cast the "
            "model before it is traced or scripted."
        )
    try:
        weights = torch.load(source, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ModelArchiverError(
            f"{source} cannot be cast: it is not a plain state dict, as written by "
            f"torch.save(model.state_dict(), …) ({str(error).partition('. ')[0].strip()})."
        ) from error
    if not isinstance(weights, Mapping) or not any(map(torch.is_tensor, weights.values())):
        raise ModelArchiverError(f"{source} cannot be cast: it is not a state dict.")
    torch.save(_lowered(weights, dtype), target)


def _lowered(weights: Mapping[str, Any], dtype: "torch.dtype") -> dict[str, Any]:
    """Cast the floating-point tensors. Tensors that share memory still share it."""
    import torch

    done: dict[tuple[Any, ...], torch.Tensor] = {}
    lowered: dict[str, Any] = {}
    for name, weight in weights.items():
        if not torch.is_tensor(weight) or not weight.is_floating_point():
            lowered[name] = weight
            continue
        place = weight.data_ptr(), weight.shape, weight.stride(), weight.dtype
        if place not in done:
            done[place] = weight.detach().to(dtype)
            if done[place].isinf().any() and not weight.isinf().any():
                raise ModelArchiverError(
                    f"{name} has values beyond the range of {dtype}; bf16 has the range of fp32."
                )
        lowered[name] = done[place]
    return lowered


def accuracy(config: ModelArchiverConfig, pack: Callable[[ModelArchiverConfig], Path]) -> str:
    """Measure the error against the original weights, and return a sentence with the result.

    A separate process runs the handler on the model's sample with the original weights, as a worker
    does. `pack` writes its model directory.
    """
    assert config.precision is not None
    settings = _settings(config.config_file, config.precision)
    settings[_SECTION]["check_accuracy"] = {
        **_samples(settings[_SECTION].get("check_accuracy")),
        "max_relative_error": 1.0,
    }
    for elsewhere in ("cuda_graphs", "device_stages"):  # unrelated to the precision
        settings[_SECTION].pop(elsewhere, None)
    settings.pop("pt2", None)
    with tempfile.TemporaryDirectory(prefix="marserve-pack-") as directory:
        configuration = Path(directory, Path(config.config_file or _CONFIG_FILE).name)
        configuration.write_text(yaml.safe_dump(settings), encoding="utf-8")
        original = replace(
            config,
            config_file=str(configuration),
            precision=None,
            archive_format="no-archive",
            export_path=directory,
        )
        child = "marserve.tools.archiver.compare"
        command = [
            sys.executable,
            "-m",
            child,
            str(pack(original)),
            settings.get("sampleInput", ""),
        ]
        try:
            done = subprocess.run(  # noqa: S603 - our own module
                command, capture_output=True, text=True, timeout=_MEASURE_SECONDS, check=False
            )
            found = json.loads(done.stdout)
        except (subprocess.TimeoutExpired, ValueError):
            found = {"reason": "its handler ended the process or took too long"}
    if "reason" in found:
        return f"Accuracy against the original was not measured: {found['reason']}"
    agreement = found["agreement"]
    best = "" if agreement is None else f", agreement {agreement:.2%}"
    return f"Against the original: relative error {found['relative_error']:.3g}{best}."


def _samples(goal: Any) -> dict[str, Any]:
    samples = goal.get("samples") if isinstance(goal, dict) else None
    return {"samples": samples} if samples else {}
