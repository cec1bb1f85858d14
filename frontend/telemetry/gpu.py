"""What NVIDIA GPUs are doing, as nvidia-smi tells it."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass

from marserve.frontend.telemetry.commands import run_command

_FIELDS = ("index", "utilization.gpu", "memory.used", "memory.total")
_SECONDS = 10.0


@dataclass(frozen=True)
class GpuFigures:
    """One GPU; None for what it does not tell (a share of a GPU has no utilization).

    Attributes:
        index: nvidia-smi's number of it.
        utilization: Percent of the time it was busy.
        memory_used: Megabytes.
        memory_utilization: Percent of its memory.
    """

    index: str
    utilization: float | None
    memory_used: float | None
    memory_utilization: float | None


async def read_gpus(at_most: int | None = None) -> list[GpuFigures]:
    """Ask nvidia-smi; nothing where it is missing, fails or takes too long.

    Args:
        at_most: So many of the first GPUs; None for all.
    """
    program = shutil.which("nvidia-smi") if at_most != 0 else None
    if program is None:
        return []
    query = f"--query-gpu={','.join(_FIELDS)}"
    try:
        output = await run_command(
            [program, query, "--format=csv,noheader,nounits"], timeout=_SECONDS
        )
    except OSError:
        return []
    return list(parse_gpus(output.stdout))[:at_most]


def parse_gpus(text: str) -> Iterator[GpuFigures]:
    """Yields a GPU for each line of ``index, utilization, memory used, memory total``."""
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == len(_FIELDS) and fields[0].isdecimal():
            busy, used, total = map(_number, fields[1:])
            share = 100 * used / total if used is not None and total else None
            yield GpuFigures(fields[0], busy, used, share)


def _number(text: str) -> float | None:
    return float(text) if text.replace(".", "", 1).isdecimal() else None
