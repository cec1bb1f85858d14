"""A picture of what splitting a queue costs; needs matplotlib."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from contenders import ADAPTIVE
from groups import FIRST_SEED
from matplotlib import pyplot as plt
from outcome import Outcome
from plots import LOAD, save, styled
from profiles import TIGHT
from replicas import CENTRAL, ROUTERS, Router, Setup

_LOADS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
_REPLICAS, _REQUESTS = 10, 10_000
_WAYS: dict[str, tuple[Router | None, dict[str, object]]] = {
    CENTRAL: (None, {"color": "black", "ls": "-", "lw": 2.0}),
    "least seconds": (ROUTERS["least seconds"], {"color": "#12715b", "ls": "-", "marker": "s"}),
    "round robin": (ROUTERS["round robin"], {"color": "#3b7dbd", "ls": "--", "marker": "v"}),
    "least requests": (ROUTERS["least requests"], {"color": "#c98a1b", "ls": "--", "marker": "o"}),
    "random": (ROUTERS["random"], {"color": "#b2452f", "ls": ":", "marker": "^"}),
}
_PANELS: dict[str, Callable[[Outcome], float]] = {
    "answered in time, %": lambda outcome: 100 * outcome.goodput,
    "mean latency of answers, ms": lambda outcome: 1000 * outcome.mean_latency,
    "mean batch": lambda outcome: outcome.batch_size,
}


def draw(directory: Path) -> None:
    """Write the picture."""
    directory.mkdir(parents=True, exist_ok=True)
    seed = FIRST_SEED["report"]
    setups = [Setup(TIGHT, ADAPTIVE, _REPLICAS, load) for load in _LOADS]
    with styled():
        figure, panels = plt.subplots(1, len(_PANELS), figsize=(11, 3.6))
        for name, (router, looks) in _WAYS.items():
            outcomes = [setup.run(router, seed, _REQUESTS) for setup in setups]
            for axes, value in zip(panels, _PANELS.values(), strict=True):
                values = np.array([value(outcome) for outcome in outcomes])
                axes.plot(_LOADS, values, label=name, **looks)
        for axes, title in zip(panels, _PANELS, strict=True):
            axes.set_title(title, fontsize=10)
        panels[0].legend(loc="lower left")
        figure.supxlabel(LOAD, fontsize=10)
        figure.subplots_adjust(bottom=0.16, left=0.05, right=0.99)
        save(figure, directory / "replicas.png")
