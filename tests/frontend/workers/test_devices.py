from pathlib import Path

import pytest

from marserve.frontend.workers.devices import (
    DeviceAllocator,
    count_gpus,
    gpu_usage,
    visible_names,
)


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program of that name, alone in the PATH; it prints what the test wrote beside it."""
    program = tmp_path / "nvidia-smi"
    program.write_text(
        '#!/bin/sh\necho "$*" >> "${0%/*}/asked"\n'
        'while IFS= read -r line; do echo "$line"; done < "${0%/*}/answer"\n'
        'read status < "${0%/*}/status"\nexit $status\n'
    )
    program.chmod(0o700)
    (tmp_path / "status").write_text("0\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def test_the_least_crowded_gpu_is_next_the_lowest_number_first() -> None:
    devices = DeviceAllocator(3)
    assert [devices.acquire() for _ in range(4)] == [(0,), (1,), (2,), (0,)]
    devices.release((1,))
    assert devices.acquire() == (1,)


def test_only_the_allowed_gpus_are_dealt_out_in_their_order() -> None:
    devices = DeviceAllocator(4)
    assert [devices.acquire(1, (3, 1)) for _ in range(3)] == [(3,), (1,), (3,)]
    assert devices.acquire() == (0,)


def test_blocks_are_neighbours_and_the_least_crowded_is_next() -> None:
    devices = DeviceAllocator(5)
    devices.acquire()
    assert [devices.acquire(2) for _ in range(3)] == [(2, 3), (0, 1), (2, 3)]
    devices.release((2, 3))
    devices.release((2, 3))
    assert devices.acquire(2) == (2, 3)
    assert devices.acquire(2, (4, 0, 2)) == (4, 0)


@pytest.mark.parametrize(
    ("count", "size", "allowed", "capacity"),
    [(8, 2, None, 4), (8, 3, None, 2), (8, 2, (1, 5, 6), 1), (1, 2, None, 0), (0, 1, None, 0)],
)
def test_the_capacity_is_how_many_blocks_there_are(
    count: int, size: int, allowed: tuple[int, ...] | None, capacity: int
) -> None:
    assert DeviceAllocator(count).capacity(size, allowed) == capacity


@pytest.mark.parametrize(
    ("environment", "names"),
    [({}, "2,3"), ({"CUDA_VISIBLE_DEVICES": "7, 6,GPU-ab,4"}, "GPU-ab,4")],
)
def test_gpus_are_named_as_the_servers_own_view_of_them_wants(
    environment: dict[str, str], names: str
) -> None:
    assert visible_names((2, 3), environment) == names


@pytest.mark.parametrize(("count", "allowed"), [(0, None), (0, (1,)), (2, ())])
def test_without_a_gpu_the_worker_runs_on_the_cpu(
    count: int, allowed: tuple[int, ...] | None
) -> None:
    devices = DeviceAllocator(count)
    assert devices.acquire(1, allowed) == ()
    devices.release(())


@pytest.mark.parametrize(
    ("environment", "count"),
    [
        ({}, 2),
        ({"CUDA_VISIBLE_DEVICES": "1"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2"}, 2),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, 0),
    ],
)
def test_gpus_are_counted_as_cuda_would_show_them(
    nvidia_smi: Path, environment: dict[str, str], count: int
) -> None:
    (nvidia_smi / "answer").write_text("GPU 0: A (UUID: 1)\n  MIG 1g\nGPU 1: A (UUID: 2)\n")
    assert count_gpus(environment) == count


def test_where_the_program_is_missing_or_fails_there_is_no_gpu(
    nvidia_smi: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (nvidia_smi / "answer").write_text("GPU 0: A (UUID: 1)\n")
    (nvidia_smi / "status").write_text("9\n")
    assert count_gpus({}) == 0
    monkeypatch.setenv("PATH", "/nonexistent")
    assert count_gpus({}) == 0


def test_the_usage_of_a_gpu_is_in_torchserves_words(nvidia_smi: Path) -> None:
    (nvidia_smi / "answer").write_text("17 %, 3 %, 1024 MiB\n")
    assert gpu_usage(1) == (
        "gpuId::1 utilization.gpu::17 % utilization.memory::3 % memory.used::1024 MiB"
    )
    assert "--id=1" in (nvidia_smi / "asked").read_text()


def test_a_usage_that_cannot_be_told_says_so(nvidia_smi: Path) -> None:
    (nvidia_smi / "answer").write_text("No devices were found\n")
    assert gpu_usage(0) == "failed to obtained gpu usage"
