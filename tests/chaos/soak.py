"""Ordinary traffic for an hour, or a million requests: a table of what grows (``make soak``).

All modes of serving, answers of 10 bytes to 200 kB, one request in a hundred that fails, clients
that leave, and an operator who looks at descriptions and metrics. It ends with 1 if anything has
grown (`growth`), or if anybody got what nobody asked for.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random

import psutil
from servers import Server

from chaos.growth import Sample, heading, leaks, row
from chaos.http_client import Connection, ask, request_bytes
from chaos.leftovers import footprint
from chaos.served import SERVED, make_request
from chaos.start import injected_environment
from marserve.tools.bench.generator.connection import REFUSED
from marserve.tools.bench.generator.destination import Destination
from marserve.tools.bench.generator.load import Load
from marserve.tools.bench.generator.processes import generate

_CLIENTS = 16
_ANSWER_SECONDS = 30.0
_REQUESTS_PER_MODEL = 100  # in a turn; one of them fails
_LARGE = 20_000  # repetitions of a token of some ten bytes
_LEAVERS_PAUSE = 0.05
_SETTLE_SECONDS = 0.5
# Those that fail in a turn: none where the mates of an answer that has begun would suffer.
_FAILING = sum(not model.streams for model in SERVED)
#: What requests that ask for a failure are answered.
_ASKED_FOR = ("418", "503", REFUSED, "507")


def main() -> int:
    """Soak; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=3600.0, help="ends it earlier")
    parser.add_argument("--samples", type=int, default=20, help="lines of the table")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        soak = Soak(Path(folder), options.requests, options.seconds, options.samples)
        try:
            soak.start()
            asyncio.run(soak.run())
            soak.stop()
        finally:
            soak.close()
    return soak.verdict()


class Soak:
    """One server and what is measured of it."""

    def __init__(self, folder: Path, requests: int, seconds: float, samples: int) -> None:
        self._tasks = folder / "tasks"
        directory = folder / "s"
        directory.mkdir()
        self._server = Server(directory, injected_environment(folder), {})
        self._requests, self._seconds, self._parts = requests, seconds, samples
        self._samples: list[Sample] = []
        self._errors: Counter[str] = Counter()
        self._answered = 0

    def start(self) -> None:
        """Start the server with all models."""
        self._server.start()
        for model in SERVED:
            model.install(self._server, None)

    def stop(self) -> None:
        """It must end well, and leave nothing."""
        self._server.stop()

    def close(self) -> None:
        """End whatever is left."""
        self._server.close()

    async def run(self) -> None:
        """All parts, one after the other; a line of the table after each."""
        print(heading(), flush=True)
        requests = _mixture()
        began = time.monotonic()
        beside = asyncio.create_task(self._disturb())
        try:
            for _ in range(self._parts):
                await self._part(requests, began)
                if time.monotonic() - began >= self._seconds:
                    break
                assert not beside.done(), beside.result()
        finally:
            beside.cancel()
            await asyncio.gather(beside, return_exceptions=True)

    async def _part(self, requests: Sequence[bytes], began: float) -> None:
        load = Load(
            clients=_CLIENTS, requests=self._requests // self._parts, timeout=_ANSWER_SECONDS
        )
        url = f"http://127.0.0.1:{self._server.ports['inference']}"
        since = time.monotonic()
        record, _ = await generate(load, Destination(url), requests)
        took = time.monotonic() - since
        self._errors.update(record.kinds)
        self._answered += record.count
        await asyncio.sleep(_SETTLE_SECONDS)
        latencies = sorted(record.latencies) or [0.0]
        sample = await asyncio.to_thread(
            self._sample,
            time.monotonic() - began,
            record.count / took,
            latencies[len(latencies) // 2],
            latencies[len(latencies) * 99 // 100],
        )
        self._samples.append(sample)
        print(row(sample), flush=True)

    def _sample(self, seconds: float, rate: float, p50: float, p99: float) -> Sample:
        server = self._server
        assert server.process is not None
        pid = server.process.pid
        seen = footprint(pid, self._tasks)
        children = psutil.Process(pid).children(recursive=True)
        logs = (server.directory / "logs").rglob("*")
        return Sample(
            seconds=seconds,
            requests=self._answered,
            rate=rate,
            p50=p50,
            p99=p99,
            frontend=seen.rss,
            workers=sum(child.memory_info().rss for child in children),
            descriptors=len(seen.descriptors),
            threads=seen.threads,
            tasks=len(seen.tasks),
            children=len(seen.children),
            series=len(server.metrics()),
            logs=sum(path.stat().st_size for path in logs if path.is_file()),
        )

    async def _disturb(self) -> None:
        """Clients that leave in the middle, and an operator who looks."""
        rng = Random("those who leave")
        ports = self._server.ports
        for number in range(sys.maxsize):
            model = rng.choice(SERVED)
            request = make_request(model, f"left-{number}", rng, ms=5)
            connection = await Connection.open(ports["inference"])
            data = request_bytes("POST", request.path, request.body)
            connection.send(data[: rng.choice((len(data), len(data) // 2))])
            await asyncio.sleep(rng.uniform(0, 0.01))
            connection.close()
            if number % 20 == 0:
                await ask(ports["management"], "GET", f"/models/{model.name}", seconds=10)
                await ask(ports["metrics"], "GET", "/metrics", seconds=10)
            await asyncio.sleep(_LEAVERS_PAUSE)

    def verdict(self) -> int:
        """Say how it went; 1 if not well."""
        problems = leaks(self._samples)
        unexpected = {kind: n for kind, n in self._errors.items() if kind not in _ASKED_FOR}
        if unexpected:
            problems.append(f"answers that nobody asked for: {unexpected}")
        failed = self._errors.total()
        asked = self._answered * _FAILING / (_REQUESTS_PER_MODEL * len(SERVED))
        if failed > asked + _FAILING * len(self._samples):  # each part begins a new turn
            problems.append(f"{failed} requests failed, and {asked:.0f} asked for it")
        print(json.dumps({"requests": self._answered, "errors": self._errors}))
        print("\n".join(f"FAILED: {problem}" for problem in problems) or "Nothing has grown.")
        return 1 if problems else 0


def _mixture() -> list[bytes]:
    """The requests of all models in turn."""
    rng = Random("the mixture")
    mixed = []
    for number in range(_REQUESTS_PER_MODEL):
        for model in SERVED:
            order: dict[str, object] = {"ms": 0}
            if number == _REQUESTS_PER_MODEL // 2 and not model.streams:
                order["do"] = rng.choice(("raise", "refuse", "memory"))
            elif number % 25 == 0 and model.form == "text":
                order["repeat"] = _LARGE
            request = make_request(model, f"{model.name}{number:04x}", rng, **order)
            mixed.append(request_bytes("POST", request.path, request.body))
    return mixed


if __name__ == "__main__":
    sys.exit(main())
