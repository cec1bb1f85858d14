"""What requests that fail cost those that share batches with them: batch 8, 20 ms a batch.

    python benchmarks/bad_requests.py [--seconds SECONDS] [--warm-up SECONDS] [CASE ...]

A share of the requests of a closed loop is bad: always the same body, or each its own. Then one
request a second ends its process. Shown are the share of the good requests that were answered with
200, and their rate against that of a run without bad requests.
"""

import argparse
import asyncio
import itertools
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from processes import Marserve, pack
from report import Row

_HANDLER = Path(__file__).with_name("bad_requests_handler.py")
_MODELS = ("loop_after", "any_after", "loop_before", "any_before")
_SHARES = (0.01, 0.03, 0.1)
_CLIENTS = 32
_BATCH_SIZE = 8
_WINDOW_MS = 20
_SEED = 1
# What can be reached with whom to blame known; else a tenth of bad requests costs 0.47 runs each.
_GOAL = 0.5
_ANSWERED = 0.99


@dataclass
class Seen:
    """What came of a run: statuses of the good and of the bad requests."""

    seconds: float = 0.0
    good: Counter[int] = field(default_factory=Counter)
    bad: Counter[int] = field(default_factory=Counter)

    @property
    def rate(self) -> float:
        """Good requests answered with 200 per second."""
        return self.good[200] / self.seconds

    @property
    def answered(self) -> float:
        """The share of the good requests that were answered with 200."""
        return self.good[200] / max(1, self.good.total())


class Clients:
    """A closed loop of clients; ``next_bad`` is asked before each request for a bad body."""

    def __init__(self, port: int, model: str, next_bad: Callable[[], bytes | None]) -> None:
        self.seen = Seen()
        self._port = port
        self._path = f"/predictions/{model}"
        self._next_bad = next_bad
        self._numbers = itertools.count()
        self._counts_from = 0.0
        self._until = 0.0

    async def run(self, warm_up: float, seconds: float) -> Seen:
        """Send requests for so long."""
        self._counts_from = time.monotonic() + warm_up
        self._until = self._counts_from + seconds
        self.seen.seconds = seconds
        await asyncio.gather(*[self._client() for _ in range(_CLIENTS)])
        return self.seen

    async def _client(self) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        while time.monotonic() < self._until:
            bad = self._next_bad()
            body = bad or b"good-%011d" % next(self._numbers)
            head = f"POST {self._path} HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            status, stays_open = await _status(reader)
            if not stays_open:
                writer.close()
                reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            if self._counts_from <= time.monotonic() < self._until:
                (self.seen.bad if bad else self.seen.good)[status] += 1
        writer.close()


async def _status(reader: asyncio.StreamReader) -> tuple[int, bool]:
    """The status of an answer, and whether the connection stays open."""
    head = await reader.readuntil(b"\r\n\r\n")
    lines = head.lower().split(b"\r\n")
    [length] = [int(line[15:]) for line in lines if line.startswith(b"content-length:")]
    await reader.readexactly(length)
    return int(head.split(None, 2)[1]), b"connection: close" not in lines


def share_of_bad(share: float, *, distinct: bool) -> Callable[[], bytes | None]:
    """Bad bodies for a share of the requests."""
    chance, numbers = random.Random(_SEED), itertools.count()

    def next_bad() -> bytes | None:
        if chance.random() >= share:
            return None
        return b"bad--%011d" % (next(numbers) if distinct else 0)

    return next_bad


def every_second(kind: bytes, *, distinct: bool) -> Callable[[], bytes | None]:
    """A body of this kind once a second."""
    due, numbers = [time.monotonic() + 1.0], itertools.count()

    def next_bad() -> bytes | None:
        if time.monotonic() < due[0]:
            return None
        due[0] += 1.0
        return kind + b"-%011d" % (next(numbers) if distinct else 0)

    return next_bad


@dataclass(frozen=True)
class Case:
    """A model, and the bad requests to it."""

    name: str
    model: str
    next_bad: Callable[[], Callable[[], bytes | None]]


def cases(shares: Sequence[float] = _SHARES) -> list[Case]:
    """All cases, those of one model one after the other and the clean run first."""
    found = []
    for model in _MODELS:
        found.append(Case(f"{model} clean", model, lambda: lambda: None))
        for distinct, share in itertools.product((False, True), shares):
            found.append(
                Case(
                    f"{model} {'distinct' if distinct else 'same'} {share:.0%}",
                    model,
                    lambda share=share, distinct=distinct: share_of_bad(share, distinct=distinct),
                )
            )
    for kind, distinct in itertools.product((b"exit", b"segv"), (False, True)):
        found.append(
            Case(
                f"loop_after {kind.decode()} {'distinct' if distinct else 'same'} 1/s",
                "loop_after",
                lambda kind=kind, distinct=distinct: every_second(kind, distinct=distinct),
            )
        )
    return found


def run(server: Marserve, case: Case, warm_up: float, seconds: float) -> Seen:
    """Run a case with a model that was just registered."""
    with server.model(f"{case.model}.mar", batch_size=_BATCH_SIZE, max_batch_delay=_WINDOW_MS):
        clients = Clients(server.inference_port, case.model, case.next_bad())
        return asyncio.run(clients.run(warm_up, seconds))


def pack_all(directory: Path) -> None:
    """Write an archive for each way to raise."""
    for model in _MODELS:
        pack(directory / "store", {"model-name": model, "handler": _HANDLER})


def measure(directory: Path, quick: bool) -> list[Row]:
    """Rates with the largest share of bad requests and with crashes, against clean runs."""
    warm_up, seconds = (1.0, 1.0) if quick else (4.0, 6.0)
    pack_all(directory)
    rows: list[Row] = []
    with Marserve(directory).running() as server:
        clean = Seen()
        for case in cases(_SHARES[-1:]):
            seen = run(server, case, warm_up, seconds)
            if case.name.endswith("clean"):
                clean = seen
                continue
            share = 1 - _SHARES[-1] if "%" in case.name else 1.0
            name = f"bad requests, {case.name}"
            rows += [
                Row(f"{name}: good req/s", [seen.rate], "without", [clean.rate * share], _GOAL),
                Row(f"{name}: good ones answered", [seen.answered], "", [1.0], _ANSWERED),
            ]
    return rows


def main() -> None:
    """Print a line for each case that is named, or for all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--warm-up", type=float, default=4.0)
    parser.add_argument("cases", nargs="*", help="parts of names of cases")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="marserve-bench-") as name:
        directory = Path(name)
        pack_all(directory)
        with Marserve(directory).running() as server:
            for case in cases():
                if options.cases and not any(part in case.name for part in options.cases):
                    continue
                seen = run(server, case, options.warm_up, options.seconds)
                print(
                    f"{case.name:32} good {seen.rate:6.1f}/s  answered {seen.answered:7.2%}  "
                    f"good {dict(seen.good)}  bad {dict(seen.bad)}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
