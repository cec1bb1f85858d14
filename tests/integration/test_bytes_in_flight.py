"""How much memory the clients of a listener may fill, and how many connections one may have."""

import contextlib
import re
import socket
from functools import partial
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_client import connected, failure
from servers import PATIENCE, make_workflow

pytestmark = pytest.mark.integration

SIZE = 6_500_000
LIMIT = 5 * SIZE + 10_000  # heads count, too
ECHO = "def handle(data, context):\n    return data and [str(len(row['body'])) for row in data]\n"
HEAD = b"POST /predictions/m HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n%b\r\n"


@pytest.fixture
def start(start_server):
    @contextlib.contextmanager
    def begin(**properties):
        with start_server(**properties) as server, contextlib.ExitStack() as opened:
            server.install(ECHO, "m")
            server.opened = opened
            yield server

    return begin


def begin_upload(server, header=b"", missing=1):
    """A client whose upload lacks its last byte."""
    connection = server.opened.enter_context(server.connect("inference"))
    with contextlib.suppress(OSError):  # refused while it sends
        connection.sendall(HEAD % (SIZE, header) + b"x" * (SIZE - missing))
    return connection


def finish(connection):
    """The status of its answer."""
    with contextlib.suppress(OSError):
        connection.sendall(b"x")
    return connection.recv(65536).split()[1]


def in_flight(server):
    counted = server.metrics("marserve_bytes_in_flight")
    [count] = [count for labels, count in counted.items() if "Inference" in labels]
    return count


def reached(server, limit):
    counted = server.metrics("marserve_limits_reached_total")
    return sum(count for labels, count in counted.items() if f'"{limit}"' in labels)


@pytest.mark.parametrize(
    ("properties", "limit"),
    [
        pytest.param(
            {"max_bytes_in_flight": str(LIMIT), "max_client_bytes_in_flight": str(2 * LIMIT)},
            "max_bytes_in_flight",
            id="of all clients",
        ),
        pytest.param(
            {"max_bytes_in_flight": str(2 * LIMIT)}, "max_client_bytes_in_flight", id="of one"
        ),
    ],
)
@pytest.mark.parametrize("header", [b"", b"X-A: 1\r\nX-A: 2\r\n"], ids=["fast path", "aiohttp"])
def test_unfinished_uploads_cannot_fill_the_memory(start, wait_for, properties, limit, header):
    with start(**properties) as server:
        memory = psutil.Process(server.process.pid)
        before = memory.memory_info().rss
        uploads = [begin_upload(server, header) for _ in range(30)]
        wait_for(lambda: reached(server, limit) == 25)
        # What had come of the last one that was refused is released a moment later.
        wait_for(lambda: in_flight(server) == pytest.approx(5 * SIZE, abs=10_000))
        assert server.inference("GET", "/ping").status_code == 200
        assert memory.memory_info().rss - before < 5 * LIMIT
        statuses = [finish(connection) for connection in uploads]
        assert (statuses.count(b"200"), statuses.count(b"503")) == (5, 25)
        wait_for(lambda: in_flight(server) == 0)
        assert finish(begin_upload(server, header)) == b"200"


def test_who_is_refused_is_told_why_and_when_to_try_again(start, wait_for):
    with start(max_bytes_in_flight=str(SIZE)) as server:
        held = begin_upload(server, missing=10)
        wait_for(lambda: in_flight(server) > SIZE - 1000)
        answer = server.predict("m", data=b"x" * 100_000)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert "max_bytes_in_flight allows no more" in answer.json()["message"]
        server.wait_printed("max_bytes_in_flight allows no more bytes.")
        held.close()
        wait_for(lambda: in_flight(server) == 0)
        assert server.predict("m", data=b"x" * 100_000).status_code == 200


def test_a_client_is_asked_for_its_body_once_at_the_limit(start, wait_for):
    limit = str(SIZE * 3 // 2)
    with start(max_bytes_in_flight=limit, max_client_bytes_in_flight=limit) as server:
        begin_upload(server, missing=10)
        wait_for(lambda: in_flight(server) > SIZE - 1000)
        connection = begin_upload(server, b"Expect: 100-continue\r\n", missing=1)
        received = b""
        while piece := connection.recv(65536):
            received += piece
        assert received.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 503 "), received[:200]


def test_a_client_whose_body_is_late_can_read_the_answer_while_it_sends(start):
    with start(request_body_timeout="1") as server:
        connection = begin_upload(server, missing=SIZE // 2)
        connection.recv(1, socket.MSG_PEEK)  # the answer has come
        for _ in range(2):
            connection.sendall(b"x" * 1000)
        received = b""
        while piece := connection.recv(65536):
            received += piece
        assert received.startswith(b"HTTP/1.1 408 ")


def test_a_client_has_so_many_connections_and_no_more(start, wait_for):
    with start(max_client_connections="3") as server:

        def ask(connection):
            with contextlib.suppress(ConnectionError):
                connection.sendall(b"GET /ping HTTP/1.1\r\nHost: h\r\n\r\n")
                return b"Healthy" in connection.recv(65536)
            return False

        clients = [server.opened.enter_context(server.connect("inference")) for _ in range(5)]
        assert sum(map(ask, clients)) <= 3
        assert reached(server, "max_client_connections") >= 2
        assert server.management("GET", "/models").status_code == 200
        for client in clients:
            client.close()
        wait_for(lambda: ask(server.opened.enter_context(server.connect("inference"))))


STREAM = """
from ts.handler_utils.utils import send_intermediate_predict_response

def handle(data, context):
    for _ in range(40 if data else 0):
        ids = context.request_ids
        send_intermediate_predict_response(["x" * 500_000], ids, "", 200, context)
    return data and ["end"]
"""


def test_a_stream_that_fills_the_memory_since_nobody_reads_it_is_broken_off(start, wait_for):
    with start(max_bytes_in_flight=str(LIMIT // 4), max_request_size="1000") as server:
        server.install(STREAM, "stream")
        lazy = server.opened.enter_context(server.connect("inference"))
        lazy.sendall(b"POST /predictions/stream HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n")
        server.wait_logged("ts_log.log", "the client is too slow, and too much is in flight")
        wait_for(lambda: in_flight(server) == 0)
        assert server.predict("m", data=b"x").text == "1"


def peak(server):
    """The most memory that the frontend has had so far, in bytes."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(re.search(r"VmHWM:\s*(\d+) kB", status)[1]) * 1024


def in_parts(server):
    """A request that aiohttp reads."""
    return server.predict("failing", files={"body": b"x" * SIZE})


NODES = f"""
def start(data, context):
    return data and ["x" for _ in data]

def wide(data, context):
    return data and ["x" * {SIZE} for _ in data]

a = b = c = wide

def end(data, context):
    data and open(GATE).read()
    return data and [str(sum(map(len, row.values()))) for row in data]
"""
FORK = "dag: {start: [a, b, c], a: [end], b: [end], c: [end]}\n"
JOINED = str(3 * SIZE)


@pytest.mark.parametrize("transport", ["rest", "grpc"])
def test_outputs_of_nodes_cannot_fill_the_memory(start, background, gate, wait_for, transport):
    limit = str(2 * LIMIT)
    with start(max_bytes_in_flight=limit, max_client_bytes_in_flight=limit) as server:
        nodes = f"GATE = {gate.path!r}\n{NODES}"
        make_workflow(server.store, "w", "models: {retry-attempts: 0}\n" + FORK, nodes)
        assert server.management("POST", "/workflows?url=w.war").status_code == 200
        before = peak(server)
        client = server.opened.enter_context(connected(server))

        def run():
            if transport == "rest":
                answer = server.inference("POST", "/wfpredict/w", data=b"x")
                return answer.text if answer.status_code == 200 else answer.status_code
            try:
                return client.predict("w", b"x").decode()
            except grpc.RpcError as error:
                return 503 if error.code() is grpc.StatusCode.UNAVAILABLE else error

        runs = [background(run) for _ in range(16)]
        wait_for(lambda: any(each.done() for each in runs))
        gate.open_for_all()
        assert {each.result(20) for each in runs} == {JOINED, 503}  # each by itself would fit
        # Beside what is counted: what is being received from workers and sent to one.
        assert peak(server) - before < 2 * LIMIT + 12 * SIZE
        if transport == "rest":
            wait_for(lambda: in_flight(server) == 0)
        assert run() == JOINED


ROWS = f"""
def handle(data, context):
    return data and ["x" * {SIZE} for _ in data]
"""


def test_answers_to_the_items_of_a_list_cannot_fill_the_memory(start, wait_for):
    with start(max_bytes_in_flight=str(2 * LIMIT)) as server:
        server.install(ROWS, "rows", "dynamicBatchSize: true\nbatchSize: 2\n")
        before = peak(server)
        answer = server.predict("rows", json=["x"] * 60)
        assert answer.status_code == 413
        assert "more memory than max_client_bytes_in_flight" in answer.json()["message"]
        assert peak(server) - before < 2 * LIMIT + 12 * SIZE
        wait_for(lambda: in_flight(server) == 0)
        assert len(server.predict("rows", json=["x"]).json()[0]) == SIZE


FAILING = "def handle(data, context):\n    assert data is None\n"


@pytest.mark.parametrize("transport", ["aiohttp", "grpc", "grpc stream"])
def test_requests_that_have_failed_are_not_kept_in_memory(start, transport):
    with start(max_bytes_in_flight=str(LIMIT)) as server:
        server.install(FAILING, "failing")
        client = server.opened.enter_context(connected(server))
        before = peak(server)
        for _ in range(40):
            if transport == "aiohttp":
                assert in_parts(server).status_code == 503
            else:
                call = client.stream if "stream" in transport else client.predict
                assert failure(partial(call, "failing", b"x" * SIZE))[0] == "UNAVAILABLE"
        assert peak(server) - before < 20 * SIZE


LARGE = f"""
def handle(data, context):
    return data and ["x" * {SIZE} for _ in data]
"""


def unread(server, target, listener="inference", requests=1):
    """A client that does not read its answers; returns the status of the first."""
    connection = server.opened.enter_context(socket.socket())
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # the kernel reads little, too
    connection.settimeout(PATIENCE)
    connection.connect(("127.0.0.1", server.ports[listener]))
    connection.sendall(b"GET %b HTTP/1.1\r\nHost: localhost\r\n\r\n" % target * requests)
    return connection.recv(12).split()[1]


def test_answers_to_requests_without_a_body_cannot_fill_the_memory(start):
    limits = dict.fromkeys(("max_bytes_in_flight", "max_client_bytes_in_flight"), str(LIMIT))
    with start(**limits, ts_open_inference_protocol="true") as server:
        server.install(LARGE, "large")
        memory = psutil.Process(server.process.pid)
        before = memory.memory_info().rss
        statuses = [unread(server, b"/predictions/large") for _ in range(60)]
        assert set(statuses[:5]) == {b"200"}
        assert statuses.count(b"503") > 40
        assert memory.memory_info().rss - before < LIMIT + 4 * SIZE
        assert reached(server, "max_bytes_in_flight")
        # A balancer must not remove every replica, and an operator must see why.
        for path in (
            "/ping",
            "/ready",
            "/v2/health/live",
            "/v2/health/ready",
            "/v2/models/m/ready",
        ):
            assert server.inference("GET", path).status_code == 200
        assert server.inference("GET", "/v2").status_code == 503
        assert server.predict("m", data=b"x").status_code == 503
        assert server.management("GET", "/models/m").status_code == 200


def test_pages_of_metrics_cannot_fill_the_memory(start, make_archive):
    with start(max_bytes_in_flight=str(LIMIT), max_request_size="1000") as server:
        archive = make_archive(server.store, ECHO, "archive")
        for number in range(60):
            name = f"m{number}{'x' * 250}"
            server.register(archive, model_name=name, initial_workers=0)
            assert server.predict(name).status_code == 503  # it is counted
        memory = psutil.Process(server.process.pid)
        before = memory.memory_info().rss
        statuses = [unread(server, b"/metrics", "metrics", 4) for _ in range(40)]
        assert {statuses[0], statuses[-1]} == {b"200", b"503"}
        assert memory.memory_info().rss - before < LIMIT + 4 * SIZE
