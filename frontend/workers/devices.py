"""How many accelerators there are, and whose turn it is.

A plain worker is told its GPU by number and sees all of them (no CUDA_VISIBLE_DEVICES), as handlers
written for TorchServe expect. TorchServe dealt GPUs out by one counter that never looked back, so
that after scaling some were crowded and others empty; here the GPU with the fewest workers is next.
A parallel worker gets a block of GPUs, and sees no others.
"""

import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

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
    """Deals out GPUs to workers, each time those with the fewest workers.

    Args:
        count: GPUs there are; with 0 every worker runs on the CPU.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._load: Counter[int] = Counter()

    def capacity(self, size: int, allowed: Sequence[int] | None = None) -> int:
        """How many workers of a model there can be that take ``size`` GPUs each."""
        return len(self._choice(allowed)) // size

    def acquire(self, size: int = 1, allowed: Sequence[int] | None = None) -> tuple[int, ...]:
        """Take GPUs for a worker; none when it has to run on the CPU.

        Args:
            size: How many; more than one are neighbours, and the first of them a multiple of
                ``size`` among those allowed.
            allowed: Only these; all when None.
        """
        choice = self._choice(allowed)
        blocks = [tuple(choice[at : at + size]) for at in range(0, len(choice) - size + 1, size)]
        if not blocks:
            return ()
        block = min(blocks, key=lambda one: sum(self._load[gpu] for gpu in one))
        self._load.update(block)
        return block

    def release(self, gpus: Iterable[int]) -> None:
        """Give GPUs back."""
        self._load.subtract(gpus)

    def _choice(self, allowed: Sequence[int] | None) -> Sequence[int]:
        if not self.count:
            return ()
        return range(self.count) if allowed is None else allowed


def visible_names(gpus: Sequence[int], environment: Mapping[str, str] = os.environ) -> str:
    """What CUDA_VISIBLE_DEVICES has to say so that a process sees these GPUs and no others.

    Args:
        gpus: Their numbers, as this process sees them.
        environment: Of this process, which may itself see a part only.
    """
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return ",".join(map(str, gpus))
    names = [name.strip() for name in visible.split(",")]
    return ",".join(names[gpu] for gpu in gpus)
