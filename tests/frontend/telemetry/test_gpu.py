import asyncio
from pathlib import Path

import pytest

from marserve.frontend.telemetry.gpu import GpuFigures, parse_gpus, read_gpus


def test_each_line_is_a_gpu() -> None:
    assert list(parse_gpus("0, 37, 1024, 4096\n1, 0, 0, 4096\n")) == [
        GpuFigures("0", 37.0, 1024.0, 25.0),
        GpuFigures("1", 0.0, 0.0, 0.0),
    ]


@pytest.mark.parametrize(
    "text",
    ["", "\n", "No devices were found\n", "NVIDIA-SMI has failed, because, of, this\n", "0, 1\n"],
)
def test_other_lines_are_none(text: str) -> None:
    assert list(parse_gpus(text)) == []


def test_a_share_of_a_gpu_has_no_utilization() -> None:
    (gpu,) = parse_gpus("0, [N/A], 512, 0\n")
    assert gpu == GpuFigures("0", None, 512.0, None)


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program of that name, to be written."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    program = tmp_path / "nvidia-smi"
    program.write_text("")
    program.chmod(0o755)
    return program


def test_the_program_is_asked(nvidia_smi: Path) -> None:
    nvidia_smi.write_text("#!/bin/sh\nprintf '0, 1, 2, 4\\n1, 3, 4, 8\\n'\n")
    assert [gpu.index for gpu in asyncio.run(read_gpus())] == ["0", "1"]
    assert [gpu.index for gpu in asyncio.run(read_gpus(1))] == ["0"]
    assert asyncio.run(read_gpus(0)) == []


@pytest.mark.parametrize("script", ["#!/bin/sh\nexit 9\n", "#!/no/such/program\n"])
def test_a_program_that_fails_tells_of_no_gpu(script: str, nvidia_smi: Path) -> None:
    nvidia_smi.write_text(script)
    assert asyncio.run(read_gpus()) == []


def test_without_the_program_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert asyncio.run(read_gpus()) == []
