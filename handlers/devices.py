"""The device of a model.

Nothing here runs at import time: a process that has initialised CUDA cannot be forked into workers.
"""

import importlib
import importlib.util
import logging
import os
from typing import Any

import torch

logger = logging.getLogger(__name__)


def choose_device(gpu_id: int | None) -> tuple[str | None, Any]:
    """Return the kind of device, as torch.load takes it, and the device itself."""
    if gpu_id is not None:
        if torch.cuda.is_available():
            device = torch.device(f"cuda:{gpu_id}")
            if torch.cuda.get_device_capability(device) >= (8, 0):  # has TF32, used by TorchServe
                torch.set_float32_matmul_precision("high")
            return "cuda", device
        if env_is_true("TS_IPEX_GPU_ENABLE") and torch.xpu.is_available():
            return "xpu", torch.device(f"xpu:{gpu_id}")
        if torch.backends.mps.is_available():
            return "mps", torch.device("mps")
    if is_installed("torch_xla"):
        return None, importlib.import_module("torch_xla.core.xla_model").xla_device()
    return "cpu", torch.device("cpu")


def optimize_with_ipex(model: Any) -> Any:
    """Optimize a model with Intel's extension if ``TS_IPEX_ENABLE`` is true."""
    if not env_is_true("TS_IPEX_ENABLE"):
        return model
    try:
        ipex = importlib.import_module("intel_extension_for_pytorch")
    except ImportError:
        logger.warning("TS_IPEX_ENABLE is set, but IPEX is not installed.", exc_info=True)
        return model
    optimized = ipex.optimize(model.to(memory_format=torch.channels_last))
    logger.info("Compiled model with ipex")
    return optimized


def is_installed(package: str) -> bool:
    """Return whether a package can be imported, without importing it."""
    return importlib.util.find_spec(package) is not None


def env_is_true(name: str) -> bool:
    """Return whether an environment variable is ``true``."""
    return os.environ.get(name, "").lower() == "true"
