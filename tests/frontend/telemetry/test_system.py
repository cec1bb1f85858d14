import asyncio
import contextlib
import logging
import sys
from collections.abc import Callable

import pytest
from steps import page_of

from marserve.frontend.telemetry.gpu import GpuReader
from marserve.frontend.telemetry.metrics import Metrics
from marserve.frontend.telemetry.system import SystemProbe

NAMES = {
    "CPUUtilization",
    "MemoryUtilization",
    "MemoryUsed",
    "MemoryAvailable",
    "DiskUtilization",
    "DiskUsage",
    "DiskAvailable",
}


@pytest.fixture
def metrics():
    return Metrics("box")


class Clock:
    """A metrics log that has a function called at each report."""

    def __init__(self, on_report: Callable[[], None]) -> None:
        self._on_report = on_report

    def report(self, *_: object) -> None:
        self._on_report()

    def write(self, *_: object) -> None:
        pass


def samples(metrics: Metrics) -> dict[str, float]:
    lines = [line.rpartition(" ") for line in page_of(metrics.registry).splitlines()]
    found = {series: float(value) for series, _, value in lines if series[0] != "#"}
    return {series: value for series, value in found.items() if not series.startswith("Requests")}


def measure_once(probe: SystemProbe) -> None:
    """One measurement, without the timer."""
    asyncio.run(probe.measure())


def test_the_host_is_measured(metrics):
    measure_once(SystemProbe(metrics, 3600, GpuReader()))
    found = samples(metrics)
    assert {series.partition("{")[0] for series in found} == NAMES
    assert 0 <= found['DiskUtilization{Level="Host",Hostname="box",}'] <= 100
    assert found['MemoryUsed{Level="Host",Hostname="box",}'] > 1


def test_each_gpu_is_a_series(metrics, driver):
    driver.gpus = [(37, 5, 1024, 4096), (None, None, 0, 4096)]
    measure_once(SystemProbe(metrics, 3600, GpuReader()))
    found = {key: value for key, value in samples(metrics).items() if key.startswith("GPU")}
    label = 'Level="Host",DeviceId="{}",Hostname="box",'
    assert found == {
        f"GPUUtilization{{{label.format(0)}}}": 37.0,
        f"GPUMemoryUsed{{{label.format(0)}}}": 1024.0,
        f"GPUMemoryUtilization{{{label.format(0)}}}": 25.0,
        f"GPUMemoryUsed{{{label.format(1)}}}": 0.0,
        f"GPUMemoryUtilization{{{label.format(1)}}}": 0.0,
    }


@pytest.fixture
def ask(metrics, tmp_path):
    """Have a program measure, given as its source."""

    def run(source):
        script = tmp_path / "collector.py"
        script.write_text(source)
        measure_once(
            SystemProbe(
                metrics, 3600, GpuReader(), command=(str(script), "--gpu", "0"), pids=lambda: (7, 8)
            )
        )

    return run


def test_a_command_measures_instead(ask, metrics):
    ask(
        "import sys\n"
        "pids = sys.stdin.readline()\n"
        "print(f'CPUUtilization.Percent:{len(sys.argv)}|#Level:Host|#hostname:x,1')\n"
        "total = sum(map(int, pids.split(',')))\n"
        "print(f'MemoryUsed.Megabytes:{total}|#Level:Host|#hostname:x,1')\n"
        "print('Unknown.x:1|#Level:Host|#hostname:x,1')\n"
        "print()\n"
        "print('7:1000')\n"
        "print('no:metric')\n"
    )
    assert samples(metrics) == {
        'CPUUtilization{Level="Host",Hostname="box",}': 3.0,
        'MemoryUsed{Level="Host",Hostname="box",}': 15.0,
    }


@pytest.mark.parametrize(
    ("source", "logged"),
    [
        ("print('rubbish')", 'Failed to parse metrics line: "rubbish".'),
        (
            "print('CPUUtilization.Percent:1|#a:b,c:d|#hostname:x,1')",
            'Failed to parse metrics line: "CPUUtilization.Percent:1|#a:b,c:d|#hostname:x,1".',
        ),
        ("import sys; sys.stderr.write('oh no')", "system_metrics_cmd: oh no"),
        ("import os; os.write(1, b'\\xff' * 10)", "Failed to parse metrics line"),
        ("print('x' * 2_000_000)", "more than"),
        ("print('bad\\n' * 100)", "Failed to parse metrics line"),
    ],
)
def test_what_a_command_does_wrong_is_reported_and_breaks_nothing(
    source, logged, ask, metrics, caplog
):
    ask(f"print('MemoryUsed.Megabytes:1|#Level:Host|#hostname:x,1', flush=True); {source}")
    assert logged in caplog.text
    assert {record.levelno for record in caplog.records} == {logging.ERROR}
    assert len(caplog.records) <= 21
    assert samples(metrics) == {'MemoryUsed{Level="Host",Hostname="box",}': 1.0}


def test_an_interpreter_that_is_gone_is_reported(metrics, monkeypatch, caplog):
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    measure_once(SystemProbe(metrics, 3600, GpuReader(), command=("x.py",)))
    assert "cannot be run" in caplog.text


def test_torchserves_own_command_is_what_is_built_in(metrics):
    command = ("ts/metrics/metric_collector.py", "--gpu", "0")
    measure_once(SystemProbe(metrics, 3600, GpuReader(), command=command))
    assert {series.partition("{")[0] for series in samples(metrics)} == NAMES


def test_it_looks_again_and_again(run, metrics):
    async def scenario():
        moments = []
        probe = SystemProbe(metrics, 30, GpuReader())
        loop = asyncio.get_running_loop()
        metrics.attach(Clock(lambda: moments.append(loop.time())))
        task = asyncio.create_task(probe.run())
        await asyncio.sleep(61)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert sorted({round(at - moments[0]) for at in moments}) == [0, 30, 60]

    run(scenario())
