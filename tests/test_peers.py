"""The comparison with other servers: what it makes of numbers, and of peers that fail."""

import importlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

_BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
_MODULES = ("cases", "contest", "contract", "page", "results", "roster", "running", "wrk")


@pytest.fixture(scope="module")
def peers():
    """The program's modules: its folders are on the path only while they load."""
    folders = [str(_BENCHMARKS / "peers"), str(_BENCHMARKS)]
    before = set(sys.modules)
    sys.path[:0] = folders
    try:
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in _MODULES})
    finally:
        del sys.path[: len(folders)]
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(str(_BENCHMARKS)):
                del sys.modules[name]


# -- the load generator's report -------------------------------------------------------------------

_REPORT = """\
Running 3s test @ http://127.0.0.1:8080/predictions/model
  1 threads and 64 connections
  Thread Stats   Avg      Stdev     Max   +/- Stdev
    Latency     2.74ms    1.01ms  20.12ms   88.12%
    Req/Sec    22.71k     1.50k   25.01k    70.00%
  Latency Distribution
     50%  611.00us
     75%    2.90ms
     90%    3.61ms
     99%    1.04s
  67830 requests in 3.00s, 76.51MB read
{errors}Requests/sec:  22610.55
Transfer/sec:     25.50MB
"""


def test_reads_rate_and_percentiles_in_their_units(peers):
    measured = peers.wrk.parse(_REPORT.format(errors=""))
    assert measured.rate == 22610.55
    assert measured.p50_ms == pytest.approx(0.611)
    assert measured.p99_ms == pytest.approx(1040)


@pytest.mark.parametrize(
    "report",
    [
        _REPORT.format(errors="  Non-2xx or 3xx responses: 1\n"),
        _REPORT.format(errors="  Socket errors: connect 0, read 3, write 0, timeout 0\n"),
        "unable to connect to 127.0.0.1:8080 Connection refused\n",
        _REPORT.format(errors="").replace("22610.55", "0.00"),
        "",
    ],
)
def test_a_run_with_errors_is_no_number(peers, report):
    with pytest.raises(peers.wrk.LoadFailed):
        peers.wrk.parse(report)


def _hanging_wrk(directory: Path) -> str:
    program = directory / "wrk"
    program.write_text("#!/bin/sh\nexec sleep 60\n", encoding="utf-8")
    program.chmod(0o755)
    return str(program)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("has_wrk", "symptom"),
    [(True, "wrk did not come to an end"), (False, "it gave no answer for 0.4 s")],
)
def test_a_server_that_never_answers_fails_alone(peers, tmp_path, monkeypatch, has_wrk, symptom):
    monkeypatch.setattr(peers.wrk, "_PROGRAM", _hanging_wrk(tmp_path) if has_wrk else None)
    monkeypatch.setattr(peers.wrk, "_TIMEOUT_SECONDS", 0.2)
    monkeypatch.setattr(peers.wrk, "_GRACE_SECONDS", 0.1)
    body = tmp_path / "body"
    body.write_bytes(b"x")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        target = peers.wrk.Target(silent.getsockname()[1], "/", body)
        with pytest.raises(peers.wrk.LoadFailed, match=symptom):
            peers.wrk.measure(target, 1, 0.1)


# -- from turns to ratios --------------------------------------------------------------------------


def _case(peers: SimpleNamespace, clients: int = 8, **changes: object) -> object:
    setting = peers.contract.Setting("echo", 1024, 32, 2)
    return peers.cases.Case("key", "title", clients, setting, **changes)


def _turns(peers: SimpleNamespace, *values: tuple[float, float]) -> list[object]:
    return [peers.results.Turn(rate, 1.0, p99, 10.0) for rate, p99 in values]


def test_ratios_are_taken_round_by_round(peers):
    turns = {
        ("key", "marserve"): _turns(peers, (100, 1), (300, 1)),
        ("key", "slow"): _turns(peers, (50, 1), (100, 1)),
        ("key", "fast"): _turns(peers, (200, 1), (600, 1)),
    }
    case = _case(peers, goals={"slow": 2.6, "fast": 1.0})
    ours, fast, slow = peers.results.standings(case, turns)
    assert (ours.entry, ours.ratios, ours.verdict) == ("marserve", [], "")
    assert (fast.ratios, fast.verdict) == ([0.5, 0.5], "≥ 1: missed")
    assert (slow.ratios, slow.verdict) == ([2.0, 3.0], "≥ 2.6: missed")
    assert peers.results.ahead_of_us([case], turns) == ["fast 2 times in “title”"]


def test_at_an_equal_load_the_tail_is_compared(peers):
    turns = {
        ("key", "marserve"): _turns(peers, (100, 2)),
        ("key", "other"): _turns(peers, (100, 5)),
    }
    _, other = peers.results.standings(_case(peers, clients=0, goals={"other": 2.0}), turns)
    assert (other.ratios, other.verdict) == ([2.5], "≥ 2: met")


def test_who_drops_out_is_not_in_the_table(peers):
    turns = {
        ("key", "marserve"): _turns(peers, (100, 1), (100, 1)),
        ("key", "other"): _turns(peers, (50, 1)),
    }
    assert [standing.entry for standing in peers.results.standings(_case(peers), turns)] == [
        "marserve"
    ]
    assert "other" not in peers.results.markdown([_case(peers)], turns)


def test_the_page_has_a_row_for_each_case_with_the_ratio_to_each_peer(peers):
    turns = {
        ("key", "marserve"): _turns(peers, (100, 1), (100, 1)),
        ("key", "other"): _turns(peers, (50, 2), (25, 4)),
    }
    head, _, row = peers.results.markdown([_case(peers, goals={"other": 2.0})], turns).splitlines()
    assert head == "|  | requests/s | p50 ms | p99 ms | CPU µs | other |"
    assert row.startswith("| title | 100 ")
    assert row.endswith("| 3 (2-4) |")


def test_a_case_without_us_has_no_table(peers):
    turns = {("key", "other"): _turns(peers, (50, 1))}
    assert peers.results.markdown([_case(peers)], turns) == ""


# -- the page --------------------------------------------------------------------------------------


def test_renews_a_page_and_leaves_what_is_written_by_hand(peers):
    page = peers.page
    text = f"before\n{page.BEGIN}\nold\n{page.END}\nafter\n"
    once = page.renew(text, "new")
    assert once == f"before\n{page.BEGIN}\n\nnew\n\n{page.END}\nafter\n"
    assert page.renew(once, "new") == once


@pytest.mark.parametrize("text", ["", "{begin}", "{end}\n{begin}", "{begin}{begin}{end}"])
def test_refuses_a_page_without_its_markers(peers, text):
    page = peers.page
    with pytest.raises(page.PageUnfit):
        page.renew(text.format(begin=page.BEGIN, end=page.END), "new")


def test_the_page_in_the_repository_can_be_renewed(peers):
    text = (_BENCHMARKS.parent / "docs" / "performance.md").read_text(encoding="utf-8")
    assert "new" in peers.page.renew(text, "new")


# -- cases and adapters ----------------------------------------------------------------------------


def test_cases_name_peers_that_exist(peers):
    names = {peer.name for peer in peers.roster.peers()} | {peers.cases.ADAPTIVE}
    for case in peers.cases.CASES:
        assert {*case.peers, *(case.goals or {}), case.reference} <= names


def test_every_peer_writes_what_it_is_started_with(peers, tmp_path):
    contract = peers.contract
    for number, peer in enumerate(peers.roster.peers()):
        for batch_size in (1, 32):
            directory = tmp_path / f"{number}-{batch_size}"
            directory.mkdir()
            site = contract.Site.prepare(directory, range(9001, 9006), Path("env/bin/python"))
            service = peer.set_up(site, contract.Setting("echo", 64, batch_size, 2))
            assert service.command
            assert service.path.startswith("/")
            assert b"letters" in service.encode(b"letters")
            for file in directory.glob("*.py"):
                compile(file.read_text(encoding="utf-8"), file, "exec")


# -- processes -------------------------------------------------------------------------------------


def _site(peers: SimpleNamespace, directory: Path) -> object:
    return peers.contract.Site(directory, (1,), Path(sys.executable))


@pytest.mark.integration
def test_a_peer_that_ends_is_told_with_its_last_words(peers, tmp_path):
    program = "import sys; sys.exit('no such model')"
    service = peers.contract.Service([sys.executable, "-c", program], "/")
    with (
        peers.running.start(service, _site(peers, tmp_path), b"body") as peer,
        pytest.raises(peers.running.PeerFailed, match=r"(?s)ended with status 1.*no such model"),
    ):
        peer.await_answer(service, b"body")


@pytest.mark.integration
def test_a_wrong_answer_is_no_answer(peers, tmp_path):
    program = """\
import http.server, socketserver, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"something else")
with socketserver.TCPServer(("127.0.0.1", int(sys.argv[1])), Handler) as server:
    server.serve_forever()
"""
    (port,) = importlib.import_module("servers").free_ports(1)
    site = peers.contract.Site(tmp_path, (port,), Path(sys.executable))
    service = peers.contract.Service([sys.executable, "-c", program, str(port)], "/")
    with (
        peers.running.start(service, site, b"body") as peer,
        pytest.raises(peers.running.PeerFailed, match="answers wrongly: b'something else'"),
    ):
        peer.await_answer(service, b"body")


@pytest.mark.integration
def test_nothing_a_peer_started_survives_a_benchmark_that_is_killed(tmp_path):
    """Neither what ignores SIGTERM nor what went into a session of its own."""
    peer = f"trap '' TERM; setsid sleep 61 & echo $! > {tmp_path}/pids; sleep 62"
    benchmark = f"""\
import subprocess, sys, time
warden = [sys.executable, {str(_BENCHMARKS / "peers" / "warden.py")!r}, "0.1", "sh", "-c", {peer!r}]
held = subprocess.Popen(warden, stdin=subprocess.PIPE, start_new_session=True)
open({str(tmp_path / "warden")!r}, "w").write(str(held.pid))
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", benchmark]) as process:
        sleeper, warden = (_number(tmp_path / name) for name in ("pids", "warden"))
        os.kill(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while psutil.pid_exists(sleeper) or psutil.pid_exists(warden):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.integration
def test_how_a_command_ended_is_passed_on_after_it_was_asked_to():
    command = "trap 'exit 7' TERM; echo ready; while :; do sleep 0.01; done"
    warden = [sys.executable, str(_BENCHMARKS / "peers" / "warden.py"), "10", "sh", "-c", command]
    with subprocess.Popen(warden, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.stdin.close()
        assert process.wait(10) == 7


def _number(file: Path) -> int:
    deadline = time.monotonic() + 10
    while not (file.exists() and file.read_text().strip()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return int(file.read_text())
