"""Large bodies through one worker: what copies between socket and handler cost."""

from pathlib import Path

import wrk
from processes import Marserve, pack
from report import Row

_SIZES = {"100 KB": 100_000, "1 MB": 1_000_000, "6 MB": 6_000_000}
_CLIENTS = 4
_GB_PER_SECOND = 1.0
_GOALS = {("1 MB", "length"): 1.0}
_HERE = Path(__file__).resolve().parent
_WAYS = {"length": "in", "noop": "in, and out again"}


def measure(directory: Path, quick: bool) -> list[Row]:
    """GB per second of request bodies, where little comes back and where they all come back."""
    repetitions, seconds = (2, 1) if quick else (5, 3)
    for name in _WAYS:
        pack(directory / "store", {"model-name": name, "handler": _HERE / f"{name}_handler.py"})
    rates: dict[tuple[str, str], list[float]] = {}
    with (
        Marserve(directory).running() as server,
        server.model("length.mar"),
        server.model("noop.mar"),
    ):
        for size, length in _SIZES.items():
            body = directory / "body"
            body.write_bytes(bytes(length))
            for _ in range(repetitions):
                for name in _WAYS:
                    target = wrk.Target(server.inference_port, f"/predictions/{name}", body)
                    rate = wrk.measure(target, _CLIENTS, seconds).rate
                    rates.setdefault((size, name), []).append(rate * length / 1e9)
    named = f"bodies, {_CLIENTS} clients, one worker: GB/s"
    return [
        Row(
            f"{size} {named} {_WAYS[name]}",
            found,
            "limit",
            [_GB_PER_SECOND],
            _GOALS.get((size, name)),
        )
        for (size, name), found in rates.items()
    ]
