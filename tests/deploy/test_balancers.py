"""Three servers behind HAProxy and behind nginx, with the files of deploy/ as they are.

What is shown here is what docs/scale.md promises: that nothing is lost while replicas fill up, are
updated, restarted or killed, and what is lost with a sequence.
"""

import contextlib
import socket
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import catalog_file
import pytest
import requests
from balancers import SEQUENCE, Balancer, Load, haproxy, nginx
from grpc_client import connected
from programs import program
from servers import HANDLERS, Server, free_ports, is_open, make_archive, wait_for

pytestmark = pytest.mark.integration

#: Answers who it is; a request is a JSON object: id, record (a file for the id), gate (waited at).
BUSY = """
import os, time
from pathlib import Path

def handle(data, context):
    if not data:
        return None
    answers = []
    for row in data:
        order = row.get("body") or {}
        if "record" in order:
            with open(order["record"], "a") as file:
                file.write(f"{order['id']}\\n")
        if "gate" in order:
            Path(order["gate"]).read_text()
        version = context.manifest["model"]["modelVersion"]
        replica = os.environ["MARSERVE_TEST"]
        answers.append({"id": order.get("id"), "replica": replica, "version": version})
    time.sleep(0.005)
    return answers
"""
BUSY_CONFIG = "jobQueueSize: 10\nbatchSize: 1\n"
STATEFUL_CONFIG = """
batchSize: 4
maxBatchDelay: 0
sequenceBatching: true
sequenceMaxIdleMSec: 60000
maxNumSequence: 100
"""
CATALOG = "catalog.json"
BALANCERS = {"haproxy": haproxy, "nginx": nginx}


def start(server: Server) -> None:
    """Start a replica; its models come from the catalog."""
    server.start()
    wait_for(lambda: server.inference("GET", "/ready").status_code == 200, what=server.console_text)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """The model store of all replicas, and where their catalog is."""
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def replicas(prepare_server, shared):
    """Three servers of one catalog and one store."""
    archives = {
        "busy": make_archive(shared, BUSY, "busy", BUSY_CONFIG),
        "streamer": make_archive(shared, HANDLERS / "streamer.py", "streamer"),
        "rememberer": make_archive(
            shared, HANDLERS / "rememberer.py", "rememberer", STATEFUL_CONFIG
        ),
    }
    catalog = shared / CATALOG
    catalog_file.write(
        catalog, {name: {"1.0": entry(archive)} for name, archive in archives.items()}
    )
    properties = {
        "model_catalog": str(catalog),
        "model_catalog_interval": "0.2",
        "model_store": str(shared),
        "lame_duck_seconds": "1",
    }
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(prepare_server(**properties)) for _ in range(3)]
        for server in servers:
            server.launch()
        for server in servers:
            server.wait_ready()
        for server in servers:
            for name in archives:
                wait_for(partial(is_model_ready, server, name))
        yield servers


@pytest.fixture(autouse=True)
def all_run(replicas):
    """Start those that a test which failed has left dead."""
    for server in replicas:
        if not server.is_running:
            start(server)


def entry(archive: Path, **members: object) -> dict[str, object]:
    """Return the entry of the catalog for an archive."""
    return {"url": archive.name, "minWorkers": 1, **members}


def is_model_ready(server: Server, name: str, version: str = "1.0") -> bool:
    """Whether a version can be asked at a replica."""
    query = {"model": name, "version": version}
    return server.inference("GET", "/ready", params=query).status_code == 200


@pytest.fixture(scope="module")
def balancers(replicas, tmp_path_factory):
    """Both in front of them; HAProxy asks whether the model ``busy`` is full."""
    with contextlib.ExitStack() as stack:
        yield {
            name: stack.enter_context(in_front_of(replicas, name, tmp_path_factory.mktemp(name)))
            for name in BALANCERS
        }


@contextlib.contextmanager
def in_front_of(replicas: Sequence[Server], name: str, folder: Path) -> Iterator[Balancer]:
    """Run a balancer, once it answers."""
    http, grpc, stats = free_ports(3)
    variables = {"LISTEN_HTTP": http, "LISTEN_GRPC": grpc, "LISTEN_STATS": stats}
    texts = {key: str(port) for key, port in variables.items()}
    for number, server in enumerate(replicas, 1):
        texts[f"REPLICA_{number}"] = f"127.0.0.1:{server.ports['inference']}"
        texts[f"REPLICA_{number}_GRPC"] = f"127.0.0.1:{server.grpc_ports['inference']}"
    texts["READY"] = "/ready?model=busy"
    with BALANCERS[name](program(name), folder, texts) as process:
        balancer = Balancer(name, f"http://127.0.0.1:{http}", {"inference": grpc}, stats)

        def said() -> str:
            return (folder / "console.txt").read_text()

        def answers() -> bool:
            assert process.poll() is None, said()
            return is_open(http) and balancer.predict("busy", json={}).status_code == 200

        wait_for(answers, what=said)
        yield balancer


@pytest.fixture(params=BALANCERS)
def balancer(request, balancers):
    """Each of them."""
    return balancers[request.param]


@dataclass
class Loads:
    """Clients of both balancers."""

    each: Sequence[Load]

    def wait_answered(self, count: int) -> None:
        """Until both have answered this many more."""
        for load in self.each:
            load.wait_answered(count)

    def wait_served_by(self, server: Server) -> None:
        """Until this replica answers requests of both."""
        since = [load.answered for load in self.each]
        for load, number in zip(self.each, since, strict=True):
            wait_for(partial(load.is_served_by, server.mark, number), what=load.served_by)

    def assert_all_answered_once(self) -> None:
        """See `assert_all_answered_once`."""
        for load in self.each:
            assert_all_answered_once(load)


@pytest.fixture
def loads(balancers):
    """Keep both busy: the expensive things are done once for both."""

    @contextlib.contextmanager
    def begin(record=None):
        with contextlib.ExitStack() as stack:
            each = []
            for name, balancer in balancers.items():
                orders = {"record": f"{record}-{name}"} if record else {}
                each.append(stack.enter_context(Load(balancer, "busy", orders=orders)))
            yield Loads(each)

    return begin


@pytest.fixture
def hold(background, make_gate):
    """Fill a replica: its handler waits at a gate, which is returned, and so does its queue."""

    def fill(server):
        gate = make_gate()
        held = [background(server.predict, "busy", json={"id": -1, "gate": gate.path})]
        gate.wait_entered()
        held += [background(server.predict, "busy", json={"id": -2}) for _ in range(10)]
        server.wait_queued("busy", 10)

        def release():
            gate.open()
            # Other clients may have been faster.
            assert {each.result().status_code for each in held} <= {200, 503}

        return release

    return fill


def assert_all_answered_once(load: Load) -> None:
    """Every request was answered 200, by an answer of its own, and no more than once."""
    failed = [
        answers
        for answers in load.answers.values()
        if len(answers) != 1 or not isinstance(answers[0], dict) or "replica" not in answers[0]
    ]
    assert set(load.statuses) == {200}, (load.balancer.name, load.statuses, failed[:5])
    assert sorted(load.answers) == list(range(len(load.answers)))
    assert all([one["id"] for one in load.answers[number]] == [number] for number in load.answers)


def test_all_replicas_serve(balancer, replicas):
    with Load(balancer, "busy") as load:
        load.wait_answered(100)
    assert_all_answered_once(load)
    assert set(load.served_by()) == {server.mark for server in replicas}


def test_a_full_replica_is_passed_over(balancer, replicas, hold):
    full = replicas[0]
    with Load(balancer, "busy") as load:
        load.wait_answered(20)
        release = hold(full)
        assert full.inference("GET", "/ready?model=busy").json()["status"] == "Full"
        load.wait_answered(20)
        if balancer.name == "haproxy":
            wait_for(lambda: balancer.states("predictions")["r1"] == "DOWN", what=balancer.states)
            assert balancer.states("sequences")["r1"] == "UP"
        since = load.answered + load.clients
        load.wait_answered(100)
        assert not load.is_served_by(full.mark, since)
        release()
        wait_for(partial(load.is_served_by, full.mark, since), what=load.served_by)
    assert_all_answered_once(load)


def test_when_all_are_full_the_client_is_told_when_to_come_again(balancer, replicas, hold):
    releases = [hold(server) for server in replicas]
    if balancer.name == "haproxy":
        wait_for(lambda: set(balancer.states("predictions").values()) == {"DOWN"})
    refused = balancer.predict("busy", json={})
    assert (refused.status_code, refused.json()["type"]) == (503, "ServiceUnavailableException")
    assert int(refused.headers["retry-after"]) >= 1
    for release in releases:
        release()
    wait_for(lambda: balancer.predict("busy", json={}).status_code == 200)


def kill(server: Server) -> None:
    """As the kernel does when there is no memory left."""
    assert server.process is not None
    server.process.kill()
    server.process.wait()


def test_a_replica_that_is_killed_costs_no_request(loads, replicas, tmp_path):
    killed, record = replicas[1], tmp_path / "record"
    with loads(record) as busy:
        busy.wait_answered(50)
        kill(killed)
        since = [load.answered + load.clients for load in busy.each]
        busy.wait_answered(150)
        for load, number in zip(busy.each, since, strict=True):
            assert not load.is_served_by(killed.mark, number)
        wait_for(lambda: not killed.processes())
        start(killed)
        busy.wait_served_by(killed)
    busy.assert_all_answered_once()
    # Only what the dead one had may have been run by it, and once more by another.
    for load in busy.each:
        runs = runs_of(load)
        assert set(runs) == set(load.answers)
        assert max(runs.values()) <= 2
        assert sum(runs.values()) - len(runs) <= load.clients


def runs_of(load: Load) -> Counter[int]:
    """How often each request was run."""
    return Counter(map(int, Path(load.orders["record"]).read_text().split()))


def test_a_rolling_restart_costs_no_request(loads, replicas, tmp_path):
    with loads(tmp_path / "record") as busy:
        for server in replicas:
            busy.wait_answered(20)
            server.stop()
            start(server)
            busy.wait_served_by(server)
    busy.assert_all_answered_once()
    for load in busy.each:
        assert runs_of(load) == Counter(dict.fromkeys(load.answers, 1))


def test_a_new_version_costs_no_request(loads, replicas, shared):
    old = entry(Path("busy.mar"))
    new = entry(make_archive(shared, BUSY, "busy-new", BUSY_CONFIG, version="2.0"))
    wanted = partial(catalog_file.change, shared / CATALOG, "busy")
    default = {"defaultVersion": True}
    with loads() as busy:
        busy.wait_answered(20)
        wanted({"1.0": old | default, "2.0": new})
        for server in replicas:
            wait_for(partial(is_model_ready, server, "busy", "2.0"))
        wanted({"1.0": old, "2.0": new | default})
        wait_for(lambda: {each.describe("busy")["modelVersion"] for each in replicas} == {"2.0"})
        since = [load.answered + load.clients for load in busy.each]
        busy.wait_answered(50)
        wanted({"2.0": new})
        wait_for(lambda: not any(len(versions(each)) > 1 for each in replicas))
        busy.wait_answered(50)
    busy.assert_all_answered_once()
    for load, number in zip(busy.each, since, strict=True):
        answered_by = {load.answers[n][0]["version"] for n in load.answers if n >= number}
        assert answered_by == {"2.0"}
    wanted({"1.0": old})  # as it was
    wait_for(lambda: {tuple(versions(each)) for each in replicas} == {("1.0",)})


def versions(server: Server) -> list[str]:
    """The versions of the model that a replica has."""
    return [each["modelVersion"] for each in server.management("GET", "/models/busy/all").json()]


def placed(balancer: Balancer, ids: Sequence[str]) -> dict[str, str]:
    """Which replica serves each sequence."""
    answers = {each: balancer.predict("busy", json={}, headers={SEQUENCE: each}) for each in ids}
    assert {answer.status_code for answer in answers.values()} == {200}
    return {each: answer.json()["replica"] for each, answer in answers.items()}


def test_a_sequence_stays_with_its_replica_until_that_dies(balancers, replicas):
    killed = replicas[2]
    ids = {name: [f"{name}-{number}" for number in range(30)] for name in balancers}
    first = {name: placed(balancer, ids[name]) for name, balancer in balancers.items()}
    for name, balancer in balancers.items():
        assert set(first[name].values()) == {server.mark for server in replicas}
        assert placed(balancer, ids[name]) == first[name]
        assert say(balancer, lost_id(first[name], killed), "a").json()["said"] == "a"
    kill(killed)
    for name, balancer in balancers.items():
        begun = say(balancer, lost_id(first[name], killed), "b")
        assert (begun.json()["said"], begun.headers["ts_request_sequence_start"]) == ("b", "true")
        after = placed(balancer, ids[name])
        assert killed.mark not in after.values()
        assert placed(balancer, ids[name]) == after
        stayed = {each for each in ids[name] if first[name][each] != killed.mark}
        assert all(after[each] == first[name][each] for each in stayed)
    wait_for(lambda: not killed.processes())
    start(killed)
    proxy = balancers["haproxy"]
    wait_for(lambda: proxy.states("sequences")["r3"] == "UP", what=proxy.states)
    assert placed(proxy, ids["haproxy"]) == first["haproxy"]


def lost_id(placed_at: Mapping[str, str], killed: Server) -> str:
    """A sequence of a replica."""
    return next(each for each, replica in placed_at.items() if replica == killed.mark)


def say(balancer: Balancer, sequence: str, letter: str) -> requests.Response:
    """Tell the model that remembers a letter, and hear all letters of the sequence."""
    return balancer.predict("rememberer", json={"say": letter}, headers={SEQUENCE: sequence})


def test_a_full_replica_keeps_its_sequences(balancer, replicas, hold):
    begun = say(balancer, balancer.name, "a")
    assert (begun.json()["said"], begun.headers["ts_request_sequence_start"]) == ("a", "true")
    releases = [hold(server) for server in replicas]
    if balancer.name == "haproxy":
        wait_for(lambda: set(balancer.states("predictions").values()) == {"DOWN"})
    going_on = say(balancer, balancer.name, "b")
    assert going_on.json()["said"] == "ab"
    assert "ts_request_sequence_start" not in going_on.headers
    for release in releases:
        release()


def test_pieces_of_an_answer_are_not_held_back(balancer, gate):
    order = {"id": "s", "pieces": 2, "gate": gate.path}
    answer = balancer.predict("streamer", json=order, stream=True)
    pieces = answer.iter_content(None)
    assert next(pieces) == b"s0;"  # though the handler waits
    gate.open()
    assert b"".join(pieces) == b"send"


def test_large_bodies_pass(balancer):
    padding = "x" * 3_000_000
    assert balancer.predict("busy", json={"id": 1, "padding": padding}).json()["id"] == 1
    too_large = balancer.predict("busy", data=b"x" * 6_700_000)
    assert (too_large.status_code, too_large.json()["type"]) == (413, "PayloadTooLargeException")


def test_grpc_passes(balancer, replicas):
    with connected(balancer) as client:
        answers = [client.predict("busy", b"{}") for _ in range(12)]
    assert len(set(answers)) == len(replicas)


def test_a_slow_client_may_send_its_request_byte_by_byte(balancer):
    body = b'{"id": 7}'
    head = (
        b"POST /predictions/busy HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
    )
    with socket.create_connection(("127.0.0.1", balancer.http_port), timeout=20) as connection:
        for byte in head + body:
            connection.sendall(bytes((byte,)))
        received = b"".join(iter(lambda: connection.recv(65536), b""))
    assert received.startswith(b"HTTP/1.1 200")
    assert b'"id": 7' in received
