"""Bodies of 1 MB through one worker: what copies between socket and handler cost."""

from pathlib import Path

import wrk
from processes import Marserve, pack
from report import Row

_BODY_BYTES = 1_000_000
_CLIENTS = 4
_GB_PER_SECOND = 1.0
_HERE = Path(__file__).resolve().parent


def measure(directory: Path, quick: bool) -> list[Row]:
    """GB per second of request bodies, where little comes back and where they all come back."""
    repetitions, seconds = (2, 1) if quick else (5, 3)
    body = directory / "body"
    body.write_bytes(bytes(_BODY_BYTES))
    for name in ("length", "noop"):
        pack(directory / "store", {"model-name": name, "handler": _HERE / f"{name}_handler.py"})
    rates: dict[str, list[float]] = {"length": [], "noop": []}
    with (
        Marserve(directory).running() as server,
        server.model("length.mar"),
        server.model("noop.mar"),
    ):
        for _ in range(repetitions):
            for name, found in rates.items():
                target = wrk.Target(server.inference_port, f"/predictions/{name}", body)
                rate = wrk.measure(target, _CLIENTS, seconds).rate
                found.append(rate * _BODY_BYTES / 1e9)
    limit = [_GB_PER_SECOND]
    named = f"1 MB bodies, {_CLIENTS} clients, one worker"
    return [
        Row(f"{named}: GB/s in", rates["length"], "limit", limit, at_least=1),
        Row(f"{named}: GB/s in, and out again", rates["noop"], "limit", limit),
    ]
