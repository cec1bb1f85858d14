"""A driver of GPUs, for machines that have none."""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from marserve.backend.measuring import measure


@dataclass
class Driver:
    """Replaces NVML.

    Attributes:
        gpus: Utilization, memory traffic (percent), memory used and total (MiB) of each; None
            for a missing figure.
        is_loaded: Whether there is a driver.
        is_old: Whether it has only the first version of the call for memory.
        fails_at_end: Whether the shutdown of a session fails.
        sessions: Open sessions.
    """

    gpus: list[tuple[Any, Any, Any, Any]] = field(default_factory=list)
    is_loaded: bool = True
    is_old: bool = False
    fails_at_end: bool = False
    sessions: int = 0
    _answers: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._answers.set()

    @contextlib.contextmanager
    def hanging(self) -> Iterator[None]:
        """Have calls hang within the block."""
        self._answers.clear()
        try:
            yield
        finally:
            self._answers.set()

    def begin(self) -> None:
        self._answers.wait()
        if not self.is_loaded:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
        self.sessions += 1

    def end(self) -> None:
        self.sessions -= 1
        if self.fails_at_end:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)

    def count(self) -> int:
        assert self.sessions
        return len(self.gpus)

    def rates(self, number: int) -> Any:
        busy, traffic, _, _ = self.gpus[number]
        if busy is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return SimpleNamespace(gpu=busy, memory=traffic)

    def memory(self, number: int, version: int | None = None) -> Any:
        _, _, used, total = self.gpus[number]
        if used is None or (version and self.is_old):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        return SimpleNamespace(used=used << 20, total=total << 20)


@pytest.fixture(autouse=True)
def driver(monkeypatch):
    """A driver without GPUs, to be given some."""
    stand_in = Driver()
    for name, function in {
        "Init": stand_in.begin,
        "Shutdown": stand_in.end,
        "DeviceGetCount": stand_in.count,
        "DeviceGetHandleByIndex": lambda number: number,
        "DeviceGetUtilizationRates": stand_in.rates,
        "DeviceGetMemoryInfo": stand_in.memory,
    }.items():
        monkeypatch.setattr(pynvml, f"nvml{name}", function)
    yield stand_in
    for thread in threading.enumerate():  # that still call it
        if thread.name == measure.__name__:
            thread.join(5)
