"""A stand-in for the NVIDIA driver's library: four GPUs.

Nothing is answered while the file is there that the environment variable DRIVER_HANGS names.
"""
# ruff: noqa: N802 - the functions have NVML's names

import os
import time
from pathlib import Path
from types import SimpleNamespace

nvmlMemory_v2 = 2  # noqa: N816 - NVML's names


class NVMLError(Exception):
    pass


def _answered(value=None):
    while Path(os.environ["DRIVER_HANGS"]).exists():
        time.sleep(0.01)
    return value


def nvmlInit():
    return _answered()


def nvmlShutdown():
    return _answered()


def nvmlDeviceGetCount():
    return _answered(4)


def nvmlDeviceGetHandleByIndex(number):
    return _answered(number)


def nvmlDeviceGetUtilizationRates(number):
    return _answered(SimpleNamespace(gpu=number, memory=number))


def nvmlDeviceGetMemoryInfo(number, version=0):
    return _answered(SimpleNamespace(used=1 << 20, total=1 << 30))
