import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from marserve.backend.profiling.memory import DeviceMemory, HostMemory, memory_of

MIB = 1 << 20
KIB = 1 << 10


def test_the_peak_of_this_process_is_seen_after_it_is_over():
    memory = HostMemory()
    memory.reset_peak()
    before = memory.peak()
    taken = b"x" * (64 * MIB)
    del taken
    assert 60 * MIB < memory.peak() - before < 80 * MIB
    memory.reset_peak()
    assert memory.peak() - before < 32 * MIB


def test_the_machine_has_memory_available():
    available = HostMemory().available()
    assert available is not None
    assert available > MIB


class Kernel:
    """A /proc and a /sys/fs/cgroup to be filled."""

    def __init__(self, root: Path) -> None:
        self.proc, self.cgroups = root / "proc", root / "cgroup"
        self.write(self.proc / "meminfo", "MemTotal: 9000 kB\nMemAvailable:    5000 kB\n")
        self.holds(100, 100)

    def write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def holds(self, now: int, peak: int) -> None:
        self.write(self.proc / "self/status", f"Name: x\nVmHWM:\t  {peak} kB\nVmRSS:\t  {now} kB\n")

    def memory(self) -> HostMemory:
        return HostMemory(self.proc, self.cgroups)


@pytest.fixture
def kernel(tmp_path):
    return Kernel(tmp_path)


def test_figures_are_counted_from_rest(kernel):
    memory = kernel.memory()
    kernel.holds(130, 170)
    assert memory.peak() == 70 * KIB
    assert memory.available() == (5000 + 30) * KIB
    kernel.holds(90, 95)
    assert memory.peak() == 0


def test_the_kernel_is_reported_to_forget_the_peak(kernel):
    kernel.memory().reset_peak()
    assert (kernel.proc / "self/clear_refs").read_text() == "5"


V1, V2 = "4:cpu,memory:/a/b\n", "0::/a/b\n"


@pytest.mark.parametrize(
    ("groups", "files", "room"),
    [
        (V2, {"a/b/memory.max": "4000", "a/b/memory.current": "1000"}, 3000),
        (V2, {"a/memory.max": "3000", "a/memory.current": "1000"}, 2000),
        (V2, {"memory.max": "2000\n", "memory.current": "1500\n"}, 500),
        (V2, {"a/b/memory.max": "max", "a/b/memory.current": "1000"}, 5000 * KIB),
        (V2, {"a/b/memory.max": "9" * 19, "a/b/memory.current": "1000"}, 5000 * KIB),
        (
            V2,
            {
                "a/b/memory.max": "4000",
                "a/b/memory.current": "4100",
                "a/b/memory.stat": "anon 1\ninactive_file 300\n",
            },
            200,
        ),
        (V2, {"a/b/memory.max": "10", "a/b/memory.current": "20"}, 0),
        (
            V1,
            {
                "memory/a/b/memory.limit_in_bytes": "4000",
                "memory/a/b/memory.usage_in_bytes": "1000",
                "memory/a/b/memory.stat": "inactive_file 1\ntotal_inactive_file 500\n",
            },
            3500,
        ),
        ("3:cpu:/a/b\n", {"cpu/a/b/memory.max": "1", "cpu/a/b/memory.current": "1"}, 5000 * KIB),
    ],
)
def test_a_container_may_leave_less_room_than_the_machine(kernel, groups, files, room):
    kernel.write(kernel.proc / "self/cgroup", groups)
    for name, text in files.items():
        kernel.write(kernel.cgroups / name, text)
    assert kernel.memory().available() == room


def test_where_the_kernel_tells_nothing_nothing_is_known(tmp_path):
    memory = HostMemory(tmp_path / "none", tmp_path / "none")
    memory.reset_peak()
    assert (memory.peak(), memory.available()) == (0, None)
    memory.release()


class Cuda:
    """The counters of torch.cuda for device 1."""

    def __init__(self) -> None:
        self.held, self.peak, self.reserved, self.free = 100, 150, 200, 1000
        self.is_used = True

    def is_initialized(self) -> bool:
        return self.is_used

    def memory_allocated(self, device: int) -> int:
        assert device == 1
        return self.held

    def max_memory_allocated(self, device: int) -> int:
        assert device == 1
        return self.peak

    def memory_reserved(self, device: int) -> int:
        assert device == 1
        return self.reserved

    def mem_get_info(self, device: int) -> tuple[int, int]:
        assert device == 1
        return self.free, 9999

    def reset_peak_memory_stats(self, device: int) -> None:
        assert device == 1
        self.peak = self.held

    def empty_cache(self) -> None:
        self.reserved = self.held


@pytest.fixture
def cuda(monkeypatch):
    cuda = Cuda()
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    return cuda


def test_a_gpus_figures_are_those_of_torchs_allocator(cuda):
    memory = memory_of(1)
    memory.reset_peak()
    assert memory.peak() == 0
    cuda.held, cuda.peak, cuda.reserved, cuda.free = 120, 400, 500, 700
    assert memory.peak() == 300
    assert memory.available() == 700 + 500 - 100
    memory.release()
    assert cuda.reserved == 120


@pytest.mark.parametrize(
    ("gpu", "used", "kind"),
    [(1, True, DeviceMemory), (1, False, HostMemory), (None, True, HostMemory)],
)
def test_batches_live_on_the_gpu_where_torch_uses_it(cuda, gpu, used, kind):
    cuda.is_used = used
    assert isinstance(memory_of(gpu), kind)


def test_without_torch_batches_live_on_the_host(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert isinstance(memory_of(1), HostMemory)
