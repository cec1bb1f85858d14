"""The ways to run ResNet-152 that are measured, each for the server and for a bare loop.

A mode is a mapping: the section ``optimization`` of a model-config.yaml, with ``compile`` and
``overlap`` besides. The server does it by its options, bare_loop.py by hand; CUDA graphs and
overlapping stages are the server's only.
"""

from collections.abc import Mapping
from typing import Any

import torch
import yaml

Mode = Mapping[str, Any]

_SETTINGS = ("compile", "overlap")  # keys that are not of the section
_LAID_OUT = {"channels_last": True, "fold_batch_norm": True}

MODES: dict[str, Mode] = {
    "fp32": {},
    "fp32, channels_last, folded": _LAID_OUT,
    "bf16": {"precision": "bf16"},
    "bf16, channels_last, folded": {"precision": "bf16", **_LAID_OUT},
    "bf16, channels_last, folded, compiled": {"precision": "bf16", **_LAID_OUT, "compile": True},
}
if torch.cuda.is_available():
    _GRAPHS = {"precision": "bf16", **_LAID_OUT, "cuda_graphs": True}
    MODES |= {
        "bf16, channels_last, folded, CUDA graphs": _GRAPHS,
        "bf16, channels_last, folded, CUDA graphs, stages overlap": {**_GRAPHS, "overlap": True},
    }

_STARTUP_SECONDS = 1200  # compiling takes a minute or two on a small machine


def model_config(mode: Mode, batch_size: int) -> str:
    """The text of a model-config.yaml."""
    options = {key: value for key, value in mode.items() if key not in _SETTINGS}
    config: dict[str, Any] = {"optimization": options} if options else {}
    if mode.get("compile"):
        config |= {"pt2": {"compile": {"enable": True}}, "startupTimeout": _STARTUP_SECONDS}
    if mode.get("compile") or mode.get("cuda_graphs"):
        config["compiledBatchSizes"] = [batch_size]
    if mode.get("overlap"):
        config["overlapStages"] = True
    return yaml.safe_dump(config)
