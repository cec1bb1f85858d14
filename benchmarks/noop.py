"""What the server itself costs: a model that does nothing, against a bare aiohttp echo.

Two echoes are measured. The goals are held against the application, what an aiohttp user would
write; the low-level ``web.Server``, aiohttp's floor, is shown beside it.
"""

from contextlib import ExitStack
from pathlib import Path

from load import Measured, Plan, generate
from processes import Marserve, echo, pack
from report import Row

_BODY_BYTES = 1024
_HANDLER = Path(__file__).with_name("noop_handler.py")
# Clients, batch size, window in ms, goal.
_CASES = ((64, 32, 2, 0.45), (1, 1, 0, 0.30))


def measure(directory: Path, quick: bool) -> list[Row]:
    """Requests per second of both, repetition by repetition in turn."""
    repetitions, seconds = (2, 1.0) if quick else (5, 3.0)
    body = directory / "body"
    body.write_bytes(bytes(range(256)) * (_BODY_BYTES // 256))
    pack(directory / "store", {"model-name": "noop", "handler": _HANDLER})
    rows: list[Row] = []
    with ExitStack() as running:
        server = running.enter_context(Marserve(directory).running())
        ports = {kind: running.enter_context(echo(kind)) for kind in ("server", "application")}
        for clients, batch_size, delay, goal in _CASES:

            def run(port: int, path: str, clients: int = clients) -> Measured:
                return generate(Plan(port, path, str(body), clients, seconds))

            with server.model("noop.mar", batch_size=batch_size, max_batch_delay=delay):
                rounds = [
                    (
                        run(ports["server"], "/echo"),
                        run(server.inference_port, "/predictions/noop"),
                        run(ports["application"], "/echo"),
                    )
                    for _ in range(repetitions)
                ]
            rows += _rows(f"noop, {_count(clients)}, batch {batch_size}", rounds, goal)
    return rows


def _count(clients: int) -> str:
    return f"{clients} client" if clients == 1 else f"{clients} clients"


def _rows(name: str, rounds: list[tuple[Measured, Measured, Measured]], goal: float) -> list[Row]:
    bare, ours, application = zip(*rounds, strict=True)
    rates = [one.rate for one in ours]
    return [
        Row(
            f"{name}: req/s", rates, "aiohttp Application", [one.rate for one in application], goal
        ),
        Row(f"{name}: req/s", rates, "aiohttp web.Server", [one.rate for one in bare]),
        Row(
            f"{name}: p50 ms",
            [one.p50_ms for one in ours],
            "aiohttp web.Server",
            [one.p50_ms for one in bare],
        ),
        Row(
            f"{name}: p99 ms",
            [one.p99_ms for one in ours],
            "aiohttp web.Server",
            [one.p99_ms for one in bare],
        ),
    ]
