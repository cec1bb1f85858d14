"""How many accelerators there are, and whose turn it is.

A plain worker is told its GPU by number and sees all of them (no CUDA_VISIBLE_DEVICES), as handlers
written for TorchServe expect. TorchServe dealt GPUs out by one counter that never looked back, so
that after scaling some were crowded and others empty; here the GPU with the fewest workers is next.
"""

import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence

_QUERY_SECONDS = 10.0


def count_gpus(environment: Mapping[str, str] = os.environ) -> int:
    """Count the NVIDIA GPUs that CUDA would show, without importing torch."""
    present = sum(line.startswith("GPU ") for line in _nvidia_smi("-L").splitlines())
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    return min(present, len([one for one in visible.split(",") if one.strip() not in ("", "-1")]))


def gpu_usage(gpu_id: int) -> str:
    """What a GPU is doing, in the words of TorchServe's describe; blocks for a moment."""
    fields = ("utilization.gpu", "utilization.memory", "memory.used")
    answer = _nvidia_smi(
        f"--id={gpu_id}", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"
    )
    values = [value.strip() for value in answer.split(",")]
    if len(values) != len(fields):
        return "failed to obtained gpu usage"  # clients compare the text
    shown = " ".join(f"{name}::{value}" for name, value in zip(fields, values, strict=True))
    return f"gpuId::{gpu_id} {shown}"


def _nvidia_smi(*arguments: str) -> str:
    """What the program prints; nothing where it is missing or fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        answer = subprocess.run(  # noqa: S603 - fixed command lines
            [program, *arguments],
            capture_output=True,
            text=True,
            timeout=_QUERY_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return answer.stdout


class DeviceAllocator:
    """Deals out GPUs to workers.

    Args:
        count: GPUs there are; with 0 every worker runs on the CPU.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._load: Counter[int] = Counter()

    def acquire(self, allowed: Sequence[int] | None = None) -> int | None:
        """Take the GPU with the fewest workers, the lowest number of these; None for the CPU.

        Args:
            allowed: Only these; all when None.
        """
        choice = range(self.count) if allowed is None else allowed
        if not self.count or not choice:
            return None
        gpu = min(choice, key=lambda one: (self._load[one], one))
        self._load[gpu] += 1
        return gpu

    def release(self, gpu: int | None) -> None:
        """Give a GPU back."""
        if gpu is not None:
            self._load[gpu] -= 1
