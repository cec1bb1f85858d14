"""Batches on one device, or single requests that follow each other through several?

    python benchmarks/pipelining.py [--quick] [--picture FILE]

A model whose batch of n takes 32 + 8n ms on one device, and a quarter of that in each of four
stages. Its devices are imagined: they sleep, so that a small machine can have four. One server,
Poisson arrivals, the same for all ways of serving, which take turns:

    one device, alone        a request at a time
    one device, batches      greedy, up to 8
    four stages, one by one  device_stages: a request is in one stage, and three are idle
    four stages, streaming   the same with overlapStages
    ... in batches           the same, greedy, up to 8
    four devices, batches    four workers with a copy of the model each

Where a way cannot carry a load, it is left out. --picture needs matplotlib.
"""

import argparse
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import open_loop
import psutil
import report
import torch
from load import Plan, generate
from processes import Marserve, pack

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PER_BATCH, PER_REQUEST, DEVICES, SIZE = 0.032, 0.008, 4, 8
_RATES = (5, 10, 15, 20, 30, 40, 60, 80, 120, 160, 240, 300)
_HANDLER = Path(__file__).with_name("pipelining_handler.py")
_SPARE = 0.95  # of what a way of serving can carry: beyond, waiting only measures the queue

_MODEL = f"""\
import time

from torch import nn


def pass_time(_stage, args):
    time.sleep(({PER_BATCH} + {PER_REQUEST} * len(args[0])) / {DEVICES})


class Stages(nn.Sequential):
    def __init__(self):
        super().__init__(*(nn.Linear(4, 4) for _ in range({DEVICES})))
        for stage in self:
            stage.register_forward_pre_hook(pass_time)
"""
_SPREAD = f"optimization: {{device_stages: [{', '.join(['cpu'] * DEVICES)}]}}\n"


@dataclass(frozen=True)
class Way:
    """A way of serving: its model-config.yaml, batch size and workers, and how it is drawn."""

    config: str
    size: int
    workers: int
    look: Mapping[str, Any]


WAYS = {
    "one device, alone": Way("", 1, 1, {"color": "#7a7a7a", "ls": ":", "marker": "^"}),
    "one device, batches": Way("", SIZE, 1, {"color": "#b2452f", "ls": "--", "marker": "o"}),
    "four stages, one by one": Way(_SPREAD, 1, 1, {"color": "#c98a1b", "ls": ":", "marker": "s"}),
    "four stages, streaming": Way(
        f"overlapStages: true\n{_SPREAD}", 1, 1, {"color": "#12715b", "ls": "-", "marker": "D"}
    ),
    "four stages, streaming batches": Way(
        f"overlapStages: true\n{_SPREAD}", SIZE, 1, {"color": "#6a4c93", "ls": "-", "marker": "P"}
    ),
    "four devices, batches": Way(
        "", SIZE, DEVICES, {"color": "#3b7dbd", "ls": "--", "marker": "v"}
    ),
}


@dataclass
class Measured:
    """Of one way: answers per second with clients enough, and by load the median and p99 in ms."""

    most: list[float]
    p50: dict[int, list[float]]
    p99: dict[int, list[float]]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure all ways, print a table and draw the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="short and once: does it run at all?")
    parser.add_argument("--picture", type=Path, help="where it is written")
    options = parser.parse_args(argv)
    busy = psutil.cpu_percent(interval=1)
    repetitions, seconds, rates = (1, 2.0, _RATES[::4]) if options.quick else (3, 8.0, _RATES)
    with tempfile.TemporaryDirectory(prefix="marserve-bench-") as directory:
        found = _measure(Path(directory), repetitions, seconds, rates)
    print(report.machine(busy))
    print(_table(found))
    if options.picture:
        _draw(found, options.picture)


def _measure(
    directory: Path, repetitions: int, seconds: float, rates: Sequence[int]
) -> dict[str, Measured]:
    model, weights, body = directory / "model.py", directory / "weights.pth", directory / "body"
    model.write_text(_MODEL, encoding="utf-8")
    body.write_bytes(b"x")
    layer = torch.nn.Linear(4, 4).state_dict()
    torch.save(
        {f"{stage}.{name}": each for stage in range(DEVICES) for name, each in layer.items()},
        weights,
    )
    for place, way in enumerate(WAYS.values()):
        config = directory / f"way{place}.yaml"
        config.write_text(f"{way.config}jobQueueSize: 1000\nbatchPolicy: greedy\n")
        files = {"model-file": model, "serialized-file": weights, "config-file": config}
        pack(
            directory / "store",
            {"model-name": f"way{place}", "handler": _HANDLER, **files},
        )
    found = {name: Measured([], {}, {}) for name in WAYS}
    with Marserve(directory).running() as server:
        for seed in range(repetitions):
            for place, (name, way) in enumerate(WAYS.items()):
                with server.model(
                    f"way{place}.mar", initial_workers=way.workers, batch_size=way.size
                ):
                    _turn(
                        server, f"/predictions/way{place}", body, found[name], seed, seconds, rates
                    )
    return found


def _turn(
    server: Marserve,
    path: str,
    body: Path,
    measured: Measured,
    seed: int,
    seconds: float,
    rates: Sequence[int],
) -> None:
    clients = 2 * DEVICES * SIZE
    port = server.inference_port
    measured.most.append(
        generate(Plan(port, path, str(body), clients, seconds / 2, warm_up=1.0, step=SIZE)).rate
    )
    for rate in rates:
        if rate > _SPARE * measured.most[0]:
            break
        arrivals = open_loop.Arrivals(port, path, str(body), rate, seconds, 1.0, seed)
        outcome = open_loop.run(arrivals)
        measured.p50.setdefault(rate, []).append(outcome.p50_ms)
        measured.p99.setdefault(rate, []).append(outcome.p99_ms)


def _table(found: Mapping[str, Measured]) -> str:
    lines = []
    for name, measured in found.items():
        lines.append(f"{name}: at most {report.spread(measured.most)} requests/s")
        lines += [
            f"  {rate:4} requests/s: p50 {report.spread(p50)} ms, "
            f"p99 {report.spread(measured.p99[rate])} ms"
            for rate, p50 in measured.p50.items()
        ]
    return "\n".join(lines)


def _draw(found: Mapping[str, Measured], path: Path) -> None:
    from matplotlib import pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 4.4))
    _draw_costs(left)
    for axes, title, highest in ((middle, "Median latency", 220), (right, "99th percentile", 300)):
        for name, measured in found.items():
            values = measured.p50 if axes is middle else measured.p99
            medians = [statistics.median(each) for each in values.values()]
            axes.plot(list(values), medians, label=name, ms=5, **WAYS[name].look)
        axes.set(xlabel="load, requests/s", ylabel="ms", title=title, ylim=(0, highest))
        axes.set_xscale("log")
        axes.set_xticks(ticks := [5, 10, 20, 50, 100, 200], map(str, ticks))
        axes.minorticks_off()
    middle.legend(frameon=False, fontsize=8, loc="upper left")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def _draw_costs(axes: "Axes") -> None:
    """What can be served at most, by the costs alone."""
    sizes = range(1, 33)
    one = [size / (PER_BATCH + PER_REQUEST * size) for size in sizes]
    single, without_fixed = DEVICES / (PER_BATCH + PER_REQUEST), DEVICES / PER_REQUEST
    lines = {
        "one device, batches": (one, "one device, batches of n"),
        "four stages, streaming": ([single] * len(one), "four stages, single requests"),
        "four devices, batches": (
            [DEVICES * rate for rate in one],
            "four devices (or four stages), batches of n",
        ),
    }
    for name, (rates, text) in lines.items():
        look = {**WAYS[name].look, "marker": None}
        axes.plot(sizes, rates, **look)
        below = name == "four stages, streaming"
        place = (0, -12 if below else 5)
        axes.annotate(text, (32, rates[-1]), place, "data", "offset points", ha="right", size=8)
    axes.axhline(without_fixed, color=WAYS["four stages, streaming"].look["color"], ls="-.", lw=1)
    text = "four stages, single requests, without the fixed cost"
    axes.annotate(text, (32, without_fixed), (0, 5), "data", "offset points", ha="right", size=8)
    axes.set(xlabel="n", ylabel="requests/s", title="At most, by the costs", ylim=(0, 560))


if __name__ == "__main__":
    main()
