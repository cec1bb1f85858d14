"""What a balancer costs beside a replica: seconds of the processor per request, of each process.

    python benchmarks/balancers.py [--rounds 5] [--seconds 2]

One server with a model that does nothing is asked directly, through HAProxy and through nginx, with
the files of deploy/; in turn, round by round, with small and with large bodies. "HAProxy alone" has
an HAProxy that answers by itself in place of the server: so much does HAProxy forward if nothing
else is slow. On a machine whose cores are shared, processor time is a better measure than requests
per second; what counts are the ratios of a round.
"""

import argparse
import os
import re
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
from load import Plan, generate
from processes import Marserve, free_ports, pack

_ROOT = Path(__file__).resolve().parent.parent
_HANDLER = Path(__file__).with_name("noop_handler.py")
_RESNET = Path(__file__).with_name("resnet18.py")
_SIZES = (1 << 10, 100 << 10)
_CLIENTS = 32
_ALONE = "HAProxy alone"
_ANSWERING = """
defaults
    mode http
    timeout client 10s
    timeout server 10s
    timeout connect 1s
frontend all
    bind 127.0.0.1:{port}
    http-request return status 200 content-type text/plain string "done"
"""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as running:
        directory = Path(folder)
        pack(directory / "store", {"model-name": "noop", "handler": _HANDLER})
        pack(directory / "store", {"model-name": "resnet18", "handler": _RESNET})
        server = running.enter_context(Marserve(directory).running())
        answering = running.enter_context(_answering(directory))
        ways = {
            "directly": (server.inference_port, 0),
            "HAProxy": running.enter_context(_haproxy(directory, server.inference_port)),
            **{
                f"HAProxy, {size} KiB": running.enter_context(
                    _haproxy(directory, server.inference_port, BUFFER=str(size << 10))
                )
                for size in (16, 128)
            },
            "nginx": running.enter_context(_nginx(directory, server.inference_port)),
            _ALONE: running.enter_context(_haproxy(directory, answering)),
        }
        with server.model("noop.mar", batch_size=32, max_batch_delay=2):
            for size in _SIZES:
                body = directory / "body"
                body.write_bytes(bytes(size))
                rounds = [
                    {
                        way: _measure(port, "noop", body, options.seconds, (pid, server.pid))
                        for way, (port, pid) in ways.items()
                        # What answers by itself does not wait for a large body, and hangs up.
                        if way != _ALONE or size == _SIZES[0]
                    }
                    for _ in range(options.rounds)
                ]
                _print(f"no-op, bodies of {size >> 10} KiB", rounds)
        with server.model("resnet18.mar", batch_size=8, max_batch_delay=20):
            way = {"directly": (server.inference_port, 0, server.pid)}
            rounds = [
                {
                    name: _measure(port, "resnet18", body, 2 * options.seconds, pids)
                    for name, (port, *pids) in way.items()
                }
                for _ in range(options.rounds)
            ]
            _print("ResNet-18, batches of 8", rounds)


def _measure(
    port: int, model: str, body: Path, seconds: float, processes: Sequence[int]
) -> tuple[float, float, float]:
    """Microseconds per request of a balancer and of a server, and requests per second."""
    before = [_cpu_seconds(pid) for pid in processes]
    plan = Plan(port, f"/predictions/{model}", str(body), _CLIENTS, seconds, warm_up=0.0)
    rate = generate(plan).rate
    spent = [_cpu_seconds(pid) - old for pid, old in zip(processes, before, strict=True)]
    balancer, server = (1e6 * each / (rate * seconds) for each in spent)
    return balancer, server, rate


def _cpu_seconds(pid: int) -> float:
    """Of a process and its children that live; 0 where there is none."""
    if not pid:
        return 0.0
    process = psutil.Process(pid)
    times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def _print(title: str, rounds: Sequence[Mapping[str, tuple[float, float, float]]]) -> None:
    print(f"\n{title}; median (lowest to highest) of {len(rounds)} rounds")
    for way in rounds[0]:
        balancer, server, rate = zip(*(one[way] for one in rounds), strict=True)
        shares = [
            one[way][0] / one["directly"][1] for one in rounds
        ]  # of what the server needs for a request that comes directly
        print(
            f"  {way:16} balancer {_spread(balancer)} µs, server {_spread(server)} µs, "
            f"balancer / server directly {_spread(shares, 2)}, {_spread(rate)} requests/s"
        )


def _spread(values: Sequence[float], digits: int = 0) -> str:
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


@contextmanager
def _haproxy(directory: Path, replica: int, **more: str) -> Iterator[tuple[int, int]]:
    """Its port and process id; with ``more`` variables."""
    variables, port = _variables(replica, "127.0.0.1:{}")
    file = _ROOT / "deploy" / "haproxy" / "haproxy.cfg"
    command = [_program("haproxy"), "-db", "-f", str(file)]
    with _running(command, directory, port, {**variables, **more}) as pid:
        yield port, pid


@contextmanager
def _answering(directory: Path) -> Iterator[int]:
    """An HAProxy that answers all requests by itself; its port."""
    (port,) = free_ports(1)
    file = directory / "answering.cfg"
    file.write_text(_ANSWERING.format(port=port))
    with _running([_program("haproxy"), "-db", "-f", str(file)], directory, port, {}):
        yield port


@contextmanager
def _nginx(directory: Path, replica: int) -> Iterator[tuple[int, int]]:
    """Its port and process id."""
    variables, port = _variables(replica, "{}")
    template = (_ROOT / "deploy" / "nginx" / "nginx.conf.template").read_text()
    file = directory / "nginx.conf"
    file.write_text(re.sub(r"\$\{(\w+)\}", lambda match: variables[match[1]], template))
    own = f"daemon off; user root; pid {directory}/pid; error_log {directory}/error.log;"
    command = [_program("nginx"), "-p", str(directory), "-c", str(file), "-g", own]
    with _running(command, directory, port, {}) as pid:
        yield port, pid


def _variables(replica: int, listen: str) -> tuple[dict[str, str], int]:
    """The variables of deploy's files, with one server for all replicas; and where clients ask."""
    http, grpc, stats = free_ports(3)
    ports = {"LISTEN_HTTP": http, "LISTEN_GRPC": grpc, "LISTEN_STATS": stats}
    variables = {name: listen.format(port) for name, port in ports.items()}
    for number in (1, 2, 3):
        variables[f"REPLICA_{number}"] = f"127.0.0.1:{replica}"
        variables[f"REPLICA_{number}_GRPC"] = f"127.0.0.1:{replica}"
    return variables, http


@contextmanager
def _running(
    command: Sequence[str], directory: Path, port: int, variables: Mapping[str, str]
) -> Iterator[int]:
    with (directory / "balancers.txt").open("ab") as console:
        process = subprocess.Popen(
            command, env={**os.environ, **variables}, stdout=console, stderr=console
        )
    try:
        while not _answers(port):
            if process.poll() is not None:
                raise SystemExit((directory / "balancers.txt").read_text())
            time.sleep(0.01)
        time.sleep(1.0)  # HAProxy takes a server for ready until its first check has failed
        yield process.pid
    finally:
        process.terminate()
        process.wait()


def _answers(port: int) -> bool:
    connections = psutil.net_connections("tcp")
    return any(each.laddr and each.laddr.port == port for each in connections)


def _program(name: str) -> str:
    path = shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")
    if path is None:
        raise SystemExit(f"{name} is not installed: apt-get install {name}")
    return path


if __name__ == "__main__":
    main()
