"""What traces cost: throughput without them, with unsampled requests, and with 1 % sampled.

    python benchmarks/tracing.py [--instances 5] [--rounds 6] [--seconds 2]

Three servers with the model of `noop_handler` take turns, with batches of up to 32 and 64 clients:

    off          no receiver of spans, no header traceparent
    other        the same server; each request has another header of the length of a traceparent
    unsampled    the same server; each request has a traceparent that is not sampled
    receiver     the same requests to a server with a receiver, which samples none
    sampled 1 %  the requests of "off" to a server with a receiver, which samples one of 100

A ratio is of two runs of one round: of their answers per second, and of their answers per second
of the frontend's CPU time, which other programs of the machine affect less. Each instance of the
servers has a speed of its own, by up to 15 %: ratios of two servers need many instances.
"""

import argparse
import os
import statistics
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

import psutil
from processes import Marserve, pack

from marserve.tools.bench.generator.destination import Destination
from marserve.tools.bench.generator.load import Load
from marserve.tools.bench.generator.processes import generate_now
from marserve.tools.bench.generator.window import measured_part
from marserve.tools.bench.payloads import Payload
from marserve.tools.bench.requests import request_bytes

_HANDLER = Path(__file__).with_name("noop_handler.py")
_PAYLOAD = Payload(bytes(range(256)) * 4, "application/octet-stream")
_UNSAMPLED = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00"}
#: The share that each server samples; None without a receiver.
_SERVERS: Mapping[str, str | None] = {"plain": None, "receiver": "0", "sampling": "0.01"}
#: By mode: its server, and the headers of its requests.
_MODES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "off": ("plain", {}),
    "other": ("plain", {"x-other-one": _UNSAMPLED["traceparent"]}),
    "unsampled": ("plain", _UNSAMPLED),
    "receiver": ("receiver", _UNSAMPLED),
    "sampled 1 %": ("sampling", {}),
}
#: Each mode with the one that it is compared with.
_COMPARED = {
    "other": "off",
    "unsampled": "other",
    "receiver": "unsampled",
    "sampled 1 %": "off",
}


class _Receiver(BaseHTTPRequestHandler):
    messages = 0

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        _Receiver.messages += 1
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@contextmanager
def _receiver() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Receiver) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


@contextmanager
def _server(directory: Path, ratio: str | None, receiver: int) -> Iterator[Marserve]:
    pack(directory / "store", {"model-name": "noop", "handler": _HANDLER})
    if ratio is not None:
        os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://127.0.0.1:{receiver}"
        os.environ["OTEL_TRACES_SAMPLER"] = "parentbased_traceidratio"
        os.environ["OTEL_TRACES_SAMPLER_ARG"] = ratio
    server = Marserve(directory)
    with ExitStack() as running:
        running.enter_context(server.running())
        for name in [name for name in os.environ if name.startswith("OTEL_")]:
            del os.environ[name]
        running.enter_context(server.model("noop.mar", batch_size=32, max_batch_delay=2))
        yield server


class _Cost(NamedTuple):
    """Of a run: answers per second, and answers per second of the frontend's CPU time."""

    rate: float
    per_cpu: float


def _cost(server: Marserve, headers: Mapping[str, str], seconds: float) -> _Cost:
    load = Load(clients=64, seconds=seconds, warm_up=0.3, step=1, timeout=60.0)
    destination = Destination(f"http://127.0.0.1:{server.inference_port}")
    request = request_bytes("/predictions/noop", destination.host, dict(headers), _PAYLOAD)
    process, counter = psutil.Process(server.pid), "marserve_request_seconds_count"
    began, count = sum(process.cpu_times()[:2]), server.counted(counter)
    found, warm = generate_now(load, destination, [request])
    took, count = sum(process.cpu_times()[:2]) - began, server.counted(counter) - count
    part = measured_part(found, load, warm)
    if found.stopped or part.errors:
        raise RuntimeError(f"Not every request was answered: {found.stopped} {part.errors}")
    return _Cost(len(part.latencies) / part.seconds, count / took)


def main() -> None:
    """Measure, and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=2.0)
    options = parser.parse_args()
    ratios: defaultdict[str, list[_Cost]] = defaultdict(list)
    by_instance: defaultdict[str, list[_Cost]] = defaultdict(list)
    for instance in range(options.instances):
        own: defaultdict[str, list[_Cost]] = defaultdict(list)
        with ExitStack() as running:
            receiver = running.enter_context(_receiver())
            folder = Path(running.enter_context(tempfile.TemporaryDirectory(prefix="tracing")))
            servers = {}
            for name, ratio in _SERVERS.items():
                (folder / name).mkdir()
                servers[name] = running.enter_context(_server(folder / name, ratio, receiver))
            for number in range(options.rounds):
                modes = list(_MODES) if number % 2 else list(reversed(_MODES))
                costs = {}
                for mode in modes:
                    server, headers = _MODES[mode]
                    costs[mode] = _cost(servers[server], headers, options.seconds)
                for mode, base in _COMPARED.items():
                    pairs = zip(costs[mode], costs[base], strict=True)
                    own[mode].append(_Cost(*(cost / usual for cost, usual in pairs)))
                print({mode: tuple(map(round, cost)) for mode, cost in costs.items()}, flush=True)
            dropped = servers["sampling"].counted("marserve_dropped_spans_total")
            print(f"instance {instance}: {_Receiver.messages} messages, {dropped:g} spans dropped")
        for mode, found in own.items():
            ratios[mode] += found
            by_instance[mode].append(_Cost(*map(statistics.median, zip(*found, strict=True))))
    for mode, base in _COMPARED.items():
        for place, name in enumerate(_Cost._fields):
            values = [cost[place] for cost in ratios[mode]]
            low, _, high = statistics.quantiles(values, n=4)
            instances = " ".join(f"{cost[place]:.3f}" for cost in by_instance[mode])
            print(
                f"{mode:<12} {name:<8} {statistics.median(values):.3f} of {base} "
                f"(quartiles {low:.3f} to {high:.3f}; instances {instances})"
            )


if __name__ == "__main__":
    main()
