"""What sequences cost: 64 clients with one each, beside 64 with independent requests, in pairs.

    python benchmarks/sequences.py [--rounds ROUNDS] [--seconds SECONDS] [--no-op]

A closed loop over one worker, whose batches take a known time (known_cost_handler.py), or none at
all with ``--no-op``: then it is the server's own work that is compared. Shown are medians, and of
the pairs the least and the greatest ratio.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path

from processes import Marserve, pack

_HERE = Path(__file__).parent
_CLIENTS = 64
_BATCHES = {
    "8": "batchSize: 8\nmaxBatchDelay: 5\n",
    "32": "batchSize: 32\nmaxBatchDelay: 5\n",
    "32, greedy": "batchSize: 32\nbatchPolicy: greedy\n",
}
_STATEFUL = f"sequenceBatching: true\nsequenceMaxIdleMSec: 60000\nmaxNumSequence: {_CLIENTS}\n"


async def _client(port: int, model: str, sequence: str, until: float) -> int:
    """Send requests until then; how many were answered."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    named = f"ts_request_sequence_id: {sequence}\r\n" if sequence else ""
    head = f"POST /predictions/{model} HTTP/1.1\r\nHost: h\r\n{named}Content-Length: 64\r\n\r\n"
    answered = 0
    while time.monotonic() < until:
        writer.write(head.encode() + bytes(64))
        lines = (await reader.readuntil(b"\r\n\r\n")).lower().split(b"\r\n")
        assert lines[0].startswith(b"http/1.1 200"), lines
        [length] = [int(line[15:]) for line in lines if line.startswith(b"content-length:")]
        await reader.readexactly(length)
        answered += 1
    writer.close()
    return answered


async def rate(port: int, model: str, seconds: float, *, has_sequences: bool) -> float:
    """Answers per second."""
    began = time.monotonic()
    ids = [f"sequence-{place}" if has_sequences else "" for place in range(_CLIENTS)]
    answered = await asyncio.gather(
        *[_client(port, model, sequence, began + seconds) for sequence in ids]
    )
    return sum(answered) / (time.monotonic() - began)


def pack_model(directory: Path, name: str, handler: Path, config: str) -> None:
    """Write an archive of a model with one worker."""
    file = directory / f"{name}.yaml"
    file.write_text(f"minWorkers: 1\nmaxWorkers: 1\n{config}")
    pack(directory / "store", {"model-name": name, "handler": handler, "config-file": file})


def compare(directory: Path, handler: Path, config: str, rounds: int, seconds: float) -> str:
    """A line about a model without, and with sequences."""
    pack_model(directory, "independent", handler, config)
    pack_model(directory, "sequences", handler, config + _STATEFUL)
    pairs = []
    with Marserve(directory).running() as server:
        port = server.inference_port
        with server.model("independent.mar"), server.model("sequences.mar"):
            for _ in range(rounds):
                alone = asyncio.run(rate(port, "independent", seconds, has_sequences=False))
                pairs.append(
                    (alone, asyncio.run(rate(port, "sequences", seconds, has_sequences=True)))
                )
    alone, together = (statistics.median(each) for each in zip(*pairs, strict=True))
    ratios = sorted(pair[1] / pair[0] for pair in pairs)
    return (
        f"independent {alone:6.0f}/s  sequences {together:6.0f}/s  "
        f"ratio {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
    )


def main() -> None:
    """Print a line for each way to form batches."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--no-op", action="store_true")
    options = parser.parse_args()
    handler = _HERE / ("noop_handler.py" if options.no_op else "known_cost_handler.py")
    for name, config in _BATCHES.items():
        with tempfile.TemporaryDirectory(prefix="marserve-bench-") as directory:
            line = compare(Path(directory), handler, config, options.rounds, options.seconds)
        print(f"batch {name:10}  {line}", flush=True)


if __name__ == "__main__":
    main()
