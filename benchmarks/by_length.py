"""A real transformer encoder on texts of many lengths: batches by length against others.

    python benchmarks/by_length.py [--rounds ROUNDS] [--seconds SECONDS] [--torchserve COMMAND]

Texts have lognormal lengths (mean 120 bytes, sigma 0.8), the same for everybody. One worker, one
thread, batches of up to 16 (encoder_handler.py). The settings take turns on one server, whose
worker stays; TorchServe, where its command is given, serves the same archive and takes its turn.
First as much as 64 clients get who ask again at once; then requests at random moments, at 0.8 times
what the fixed window has carried in the order of arrival. Shown are medians of the rounds, and of
the ratios to that window in the same round the least and the greatest.
"""

import argparse
import asyncio
import os
import random
import signal
import statistics
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from processes import Marserve, free_ports, pack

_HERE = Path(__file__).parent
_CLIENTS = 64
_MEAN_BYTES, _SIGMA = 120, 0.8
_LOAD = 0.8
_SETTLING_SECONDS = 1.5  # while costs are learnt anew, and what waited is answered
_WINDOW = "batch_policy=fixed&batch_size=16&max_batch_delay=20"
_GREEDY = "batch_policy=greedy&batch_size=16"
_ADAPTIVE = "batch_policy=adaptive&batch_size=16"
_IN_ORDER = "fixed window, in order"
_SETTINGS = {
    _IN_ORDER: f"{_WINDOW}&batch_bucket_by=none",
    "fixed window, by length": f"{_WINDOW}&batch_bucket_by=length",
    "greedy, in order": f"{_GREEDY}&batch_bucket_by=none",
    "greedy, by length": f"{_GREEDY}&batch_bucket_by=length",
    "adaptive, in order": f"{_ADAPTIVE}&batch_bucket_by=none",
    "adaptive, auto": f"{_ADAPTIVE}&batch_bucket_by=auto",
}
_TORCHSERVE = "TorchServe's window"
_MODEL = "encoder"


@dataclass
class Turn:
    """What came of one turn.

    Attributes:
        seconds: How long it was measured.
        latencies: Of the answers, seconds.
    """

    seconds: float
    latencies: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Answers per second."""
        return len(self.latencies) / self.seconds

    def percentile(self, share: float) -> float:
        """Milliseconds."""
        ordered = sorted(self.latencies)
        return 1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def texts(seed: int) -> Iterator[bytes]:
    """Of lognormal lengths."""
    rng = random.Random(seed)
    while True:
        length = _MEAN_BYTES * rng.lognormvariate(-(_SIGMA**2) / 2, _SIGMA)
        yield b"x" * max(4, round(length))


class Connection:
    """One client."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def __aenter__(self) -> Self:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()

    async def ask(self, text: bytes) -> None:
        """Send a text and read the answer."""
        head = f"POST /predictions/{_MODEL} HTTP/1.1\r\nHost: h\r\nContent-Length: {len(text)}"
        self._writer.write(f"{head}\r\n\r\n".encode() + text)
        lines = (await self._reader.readuntil(b"\r\n\r\n")).lower().split(b"\r\n")
        assert lines[0].startswith(b"http/1.1 200"), lines
        [length] = [int(line[15:]) for line in lines if line.startswith(b"content-length:")]
        await self._reader.readexactly(length)


async def closed_loop(port: int, seconds: float, seed: int) -> Turn:
    """As much as the clients get."""
    began = time.monotonic()
    turn, bodies = Turn(seconds), texts(seed)

    async def client() -> None:
        async with Connection(port) as connection:
            while (sent := time.monotonic()) < began + _SETTLING_SECONDS + seconds:
                await connection.ask(next(bodies))
                if (
                    began + _SETTLING_SECONDS
                    < time.monotonic()
                    < began + seconds + _SETTLING_SECONDS
                ):
                    turn.latencies.append(time.monotonic() - sent)

    await asyncio.gather(*[client() for _ in range(_CLIENTS)])
    return turn


async def open_loop(port: int, seconds: float, seed: int, rate: float) -> Turn:
    """Requests at random moments, over as many connections as it takes."""
    turn, bodies, rng = Turn(seconds), texts(seed), random.Random(seed)
    began = time.monotonic()
    idle: list[Connection] = []
    moment, tasks = began, []

    async def send(text: bytes, due: float) -> None:
        connection = idle.pop() if idle else await Connection(port).__aenter__()
        await connection.ask(text)
        idle.append(connection)
        if due > began + _SETTLING_SECONDS:
            turn.latencies.append(time.monotonic() - due)

    while moment < began + _SETTLING_SECONDS + seconds:
        moment += rng.expovariate(rate)
        await asyncio.sleep(max(0.0, moment - time.monotonic()))
        tasks.append(asyncio.create_task(send(next(bodies), moment)))
    await asyncio.gather(*tasks)
    for connection in idle:
        await connection.__aexit__()
    return turn


@contextmanager
def torchserve(command: str, directory: Path) -> Iterator[int]:
    """A TorchServe with the same archive and the same window; its port."""
    ports = free_ports(5)
    names = ("inference_address", "management_address", "metrics_address")
    lines = [f"{name}=http://127.0.0.1:{port}" for name, port in zip(names, ports, strict=False)]
    lines += [f"grpc_inference_port={ports[3]}", f"grpc_management_port={ports[4]}"]
    lines += ["disable_token_authorization=true", "enable_model_api=true", "model_store=store"]
    Path(directory, "config.properties").write_text("\n".join([*lines, ""]))
    arguments = ["--start", "--foreground", "--ncs", "--ts-config", "config.properties"]
    environment = {**os.environ, "TMPDIR": str(directory), "TEMP": str(directory)}
    environment["PATH"] = f"{Path(command).parent}{os.pathsep}{environment['PATH']}"
    with (
        Path(directory, "console.log").open("wb") as console,
        subprocess.Popen(
            [command, *arguments],
            cwd=directory,
            env=environment,
            stdout=console,
            stderr=console,
            start_new_session=True,
        ) as process,
    ):
        try:
            register = (
                f"http://127.0.0.1:{ports[1]}/models?url={_MODEL}.mar&initial_workers=1"
                "&synchronous=true&batch_size=16&max_batch_delay=20"
            )
            _retry(lambda: urllib.request.urlopen(register, data=b"", timeout=120).read())
            yield ports[0]
        finally:
            os.killpg(process.pid, signal.SIGTERM)  # it is a script that has started Java


def _retry(call: Callable[[], object], seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while True:
        try:
            call()
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.5)
        else:
            return


def measure(options: argparse.Namespace, directory: Path) -> dict[str, list[tuple[Turn, Turn]]]:
    """Closed and open loop of each contender, in each round."""
    ours, theirs = directory / "marserve", directory / "torchserve"
    for each in (ours, theirs):
        pack(each / "store", {"model-name": _MODEL, "handler": _HERE / "encoder_handler.py"})
    found: dict[str, list[tuple[Turn, Turn]]] = {}
    with (
        Marserve(ours).running() as server,
        server.model(f"{_MODEL}.mar", job_queue_size=10_000),
        _maybe_torchserve(options.torchserve, theirs) as other,
    ):
        for number in range(options.rounds):
            names = [*_SETTINGS, *([_TORCHSERVE] if other else [])]
            rate = 0.0
            for name in names:
                port = other if name == _TORCHSERVE else server.inference_port
                if name in _SETTINGS:
                    server.manage("PUT", f"/models/{_MODEL}?{_SETTINGS[name]}")
                full = asyncio.run(closed_loop(port, options.seconds, number))
                rate = rate or _LOAD * full.rate
                found.setdefault(name, []).append(
                    (full, asyncio.run(open_loop(port, options.seconds, number, rate)))
                )
    return found


@contextmanager
def _maybe_torchserve(command: str | None, directory: Path) -> Iterator[int]:
    if command is None:
        yield 0
        return
    with torchserve(command, directory) as port:
        yield port


def report(found: dict[str, list[tuple[Turn, Turn]]]) -> None:
    """A line for each contender."""
    print(f"{'':26}{'answers/s':>10}{'ratio':>22}{'p50 ms':>9}{'p99 ms':>9}{'p99 ratio':>22}")
    for name, turns in found.items():
        rates = [full.rate for full, _ in turns]
        p50s = [loaded.percentile(0.5) for _, loaded in turns]
        p99s = [loaded.percentile(0.99) for _, loaded in turns]
        base = found[_IN_ORDER]
        by_rate = [
            full.rate / other.rate for (full, _), (other, _) in zip(turns, base, strict=True)
        ]
        by_p99 = [
            loaded.percentile(0.99) / other.percentile(0.99)
            for (_, loaded), (_, other) in zip(turns, base, strict=True)
        ]
        print(
            f"{name:26}{statistics.median(rates):10.0f}{_spread(by_rate):>22}"
            f"{statistics.median(p50s):9.0f}{statistics.median(p99s):9.0f}{_spread(by_p99):>22}"
        )


def _spread(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each turn, twice")
    parser.add_argument("--torchserve", help="the command of a TorchServe 0.12")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="marserve-bench-") as directory:
        report(measure(options, Path(directory)))


if __name__ == "__main__":
    main()
