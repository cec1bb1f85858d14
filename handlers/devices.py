"""Which device a model is on, and what the machine has for it.

Asked for while a handler is initialised and never while importing: looking at a GPU initialises
CUDA, and a process that has done so cannot be forked into workers.
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
    """Optimize a model with Intel's extension, where ``TS_IPEX_ENABLE`` asks for it."""
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
    """Whether a package can be imported; it is not."""
    return importlib.util.find_spec(package) is not None


def env_is_true(name: str) -> bool:
    """Whether an environment variable says true."""
    return os.environ.get(name, "").lower() == "true"
