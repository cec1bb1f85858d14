"""Unary gRPC predictions: marserve, the real TorchServe and a bare grpc.aio echo, in one run.

    python benchmarks/grpc_predictions.py --torchserve /path/to/venv/bin/torchserve [--quick]

The servers take turns, and those that are not measured are stopped (SIGSTOP) meanwhile. TorchServe
and marserve get the same archive, whose handler answers with what it was given, and the same
configuration: one worker, and the shortest batching window that both know, a millisecond, for it is
most of what a single client measures where batches are larger than one. The echo is no model
server: it says what Python and gRPC can reach on this machine with this load.

Without TorchServe, marserve is held against the echo alone.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).with_name("peers")))

import grpc
import h2load
import psutil
import report
from adapters import marserve, torchserve
from contest import body_of
from contract import OWN_PYTHON, PORTS, Service, Setting, Site
from load import Measured
from processes import free_ports
from running import PeerFailed, RunningPeer, start

_HERE = Path(__file__).resolve().parent
_METHOD = "/org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions"
_OURS, _THEIRS, _ECHO = "marserve", "TorchServe", "grpc.aio echo"
_GOAL = 1.5  # times TorchServe's rate
_SIZES = {"1 KB": 1024, "1 MB": 2**20}
_CLIENTS = (1, 64)
_BATCH_SIZES = (1, 32)
_WINDOW_MS = 1  # TorchServe takes 0 for not given, which is 100
_READY_SECONDS = 120.0
_FEWEST_CALLS = 64
_SETTLE_SECONDS = 0.2


@dataclass(frozen=True)
class Runs:
    """How often and how long.

    Attributes:
        rounds: Turns of each.
        seconds: About what a turn takes.
        warm_up_calls: Before the first turn of a case; a JVM compiles what was called often.
    """

    rounds: int
    seconds: float
    warm_up_calls: int


class Entry:
    """A server that takes part.

    Args:
        peer: Its processes.
        port: Its gRPC inference port.
        answers_as_it_came: Whether it sends the request's message back, as the echo does.
    """

    def __init__(self, peer: RunningPeer, port: int, answers_as_it_came: bool) -> None:
        self.peer = peer
        self._port = port
        self._as_it_came = answers_as_it_came

    def await_answer(self) -> None:
        """Ask until the answer is right.

        Raises:
            PeerFailed: There was none in time, or a wrong one.
        """
        request = _request(b"ready?")
        expected = self._answer(b"ready?")
        with grpc.insecure_channel(f"127.0.0.1:{self._port}") as channel:
            call = channel.unary_unary(_METHOD)
            deadline = time.monotonic() + _READY_SECONDS
            while True:
                try:
                    answer = call(request, wait_for_ready=True, timeout=_READY_SECONDS)
                except grpc.RpcError as error:  # listeners open before models are loaded
                    if time.monotonic() > deadline:
                        raise self.peer.failure(f"not ready: {error}") from None
                    time.sleep(0.1)
                else:
                    break
        if answer != expected:
            raise self.peer.failure(f"answers wrongly: {answer!r} instead of {expected!r}")

    def calls(self, directory: Path, body: bytes) -> h2load.Calls:
        """What the generator needs to know."""
        file = directory / "message"
        h2load.write_message(file, _request(body))
        return h2load.Calls(self._port, _METHOD, file, len(self._answer(body)))

    def _answer(self, body: bytes) -> bytes:
        return _request(body) if self._as_it_came else _field(1, body)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure all cases and print the table."""
    options = _parser().parse_args(argv)
    runs = Runs(1, 0.5, 200) if options.quick else Runs(options.rounds, options.seconds, 4000)
    generator = h2load.name()
    busy = psutil.cpu_percent(interval=1)
    rows: list[report.Row] = []
    with tempfile.TemporaryDirectory(prefix="marserve-bench-") as directory:
        for batch_size in _BATCH_SIZES:
            place = Path(directory, f"batch-{batch_size}")
            with _servers(place, batch_size, options.torchserve) as entries:
                for size in _SIZES:
                    for clients in _CLIENTS:
                        name = f"clients {clients:2}, {size}, batch {batch_size:2}"
                        _say(f"measuring {name} ...")
                        rows += _rows(
                            name, _take_turns(entries, place, _SIZES[size], clients, runs)
                        )
    print(f"{report.machine(busy)}\nLoad: {generator}; a connection per client.\n")
    print(report.table(rows))


@contextmanager
def _servers(directory: Path, batch_size: int, program: Path | None) -> Iterator[dict[str, Entry]]:
    """All that take part, ready and stopped; by name."""
    setting = Setting("echo", _SIZES["1 KB"], batch_size, window_ms=_WINDOW_MS)
    with ExitStack() as running:
        entries = {}
        for name in (_ECHO, _THEIRS, _OURS):
            if name == _THEIRS and program is None:
                continue
            place = directory / name.split()[-1]
            place.mkdir(parents=True)
            python = program.with_name("python") if name == _THEIRS and program else OWN_PYTHON
            site = Site.prepare(place, free_ports(PORTS), python)
            peer = running.enter_context(start(_service(name, site, setting), site, b""))
            entries[name] = Entry(peer, site.ports[3], name == _ECHO)
        for entry in entries.values():
            entry.await_answer()
            entry.peer.freeze()
        yield entries
        for entry in entries.values():
            entry.peer.dismiss()


def _service(name: str, site: Site, setting: Setting) -> Service:
    if name == _ECHO:
        return Service([str(OWN_PYTHON), str(_HERE / "grpc_echo.py"), str(site.ports[3])], "")
    return {_OURS: marserve, _THEIRS: torchserve}[name].PEER.set_up(site, setting)


def _take_turns(
    entries: Mapping[str, Entry], directory: Path, size: int, clients: int, runs: Runs
) -> dict[str, list[Measured]]:
    body = body_of(Setting("echo", size, 1, 0))
    turns: dict[str, list[Measured]] = {name: [] for name in entries}
    counts: dict[str, int] = {}
    for _ in range(runs.rounds):
        for name, entry in entries.items():
            calls = entry.calls(directory, body)
            entry.peer.thaw()
            try:
                if name not in counts:
                    counts[name] = _warm_up(calls, clients, runs)
                time.sleep(_SETTLE_SECONDS)
                turns[name].append(h2load.measure(calls, clients, counts[name]))
            except h2load.LoadFailed as error:
                raise entry.peer.failure(str(error)) from None
            finally:
                entry.peer.freeze()
    return turns


def _warm_up(calls: h2load.Calls, clients: int, runs: Runs) -> int:
    """Call until it is warm; how many calls a turn of the wanted length has."""
    first = h2load.measure(calls, clients, _FEWEST_CALLS)
    warm = min(runs.warm_up_calls, max(_FEWEST_CALLS, int(first.rate * runs.seconds * 2)))
    rate = h2load.measure(calls, clients, warm).rate
    return max(_FEWEST_CALLS, int(rate * runs.seconds))


def _rows(name: str, turns: Mapping[str, Sequence[Measured]]) -> Iterator[report.Row]:
    ours = turns[_OURS]
    if _THEIRS in turns:
        theirs = turns[_THEIRS]
        yield report.Row(f"{name}: calls/s", _rates(ours), _THEIRS, _rates(theirs), _GOAL)
        yield report.Row(
            f"{name}: p99 ms", [one.p99_ms for one in ours], _THEIRS, [one.p99_ms for one in theirs]
        )
    yield report.Row(f"{name}: calls/s", _rates(ours), _ECHO, _rates(turns[_ECHO]))


def _rates(turns: Sequence[Measured]) -> list[float]:
    return [one.rate for one in turns]


def _request(body: bytes) -> bytes:
    """A PredictionsRequest of the model "model", whose only input is called "body"."""
    return _field(1, b"model") + _field(3, _field(1, b"body") + _field(2, body))


def _field(number: int, value: bytes) -> bytes:
    """A field of a protobuf message that has a length: its tag, the length, the value."""
    return bytes([number << 3 | 2]) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    groups = []
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*groups, value])


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--torchserve", type=_absolute, help="the command of a TorchServe 0.12")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each (5)")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each turn, about (2)")
    parser.add_argument("--quick", action="store_true", help="one short turn: does it run at all?")
    return parser


def _absolute(text: str) -> Path:
    return Path(text).absolute()


if __name__ == "__main__":
    try:
        main()
    except (PeerFailed, h2load.LoadFailed) as error:
        sys.exit(str(error))
