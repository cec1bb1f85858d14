"""Clients that ask for much and do not take it."""

import contextlib
import socket
import ssl
import time

import pytest

pytestmark = pytest.mark.integration

SIZE = 6_000_000
CODE = f"""
from ts.handler_utils.utils import send_intermediate_predict_response

def handle(data, context):
    if data is None:
        return None
    if data[0]["body"] == b"stream":
        for _ in range(100):
            ids = context.request_ids
            send_intermediate_predict_response(["x" * {SIZE // 100}], ids, "", 200, context)
    return [b"x" * {SIZE}]
"""


@pytest.fixture(scope="module", params=["http", "https", "unix"])
def server(request, prepare_server, wait_for):
    """A server that serves inference over one of these, and the rest over http."""
    with prepare_server() as server:
        path = server.directory / "i"
        place = f"127.0.0.1:{server.ports['inference']}"
        address = f"unix:{path}" if request.param == "unix" else f"{request.param}://{place}"
        server.write_property("inference_address", address)
        server.write_property("response_write_timeout", "1")
        server.write_property("response_write_rate", "1000000")
        server.launch()
        wait_for(lambda: "Model server started." in server.console_text())
        server.kind, server.path = request.param, path
        server.install(CODE, "big")
        yield server
        server.stop()


@contextlib.contextmanager
def client(server):
    """A connection whose kernel buffers little."""
    family = socket.AF_UNIX if server.kind == "unix" else socket.AF_INET
    with socket.socket(family) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        connection.settimeout(20)
        place = ("127.0.0.1", server.ports["inference"])
        connection.connect(str(server.path) if server.kind == "unix" else place)
        if server.kind != "https":
            yield connection
            return
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with context.wrap_socket(connection) as secure:
            yield secure


def request(body, *headers):
    lines = ["POST /predictions/big HTTP/1.1", "Host: h", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


def disconnected(server):
    """How many clients were too slow."""
    counted = server.metrics("marserve_limits_reached_total")
    return sum(count for labels, count in counted.items() if "response_write_timeout" in labels)


def in_flight(server):
    counted = server.metrics("marserve_bytes_in_flight")
    [count] = [count for labels, count in counted.items() if "Inference" in labels]
    return count


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        pytest.param(b"whole", [], id="fast path"),
        pytest.param(b"whole", ["Expect: 100-continue"], id="aiohttp"),
        pytest.param(b"stream", [], id="stream"),
        pytest.param(b"whole", ["Connection: close"], id="last"),
    ],
)
def test_a_client_that_reads_nothing_is_disconnected(server, wait_for, body, headers):
    before = disconnected(server)
    with client(server) as connection:
        connection.sendall(request(body, *headers))
        wait_for(lambda: in_flight(server) > SIZE / 4)
        wait_for(lambda: disconnected(server) == before + 1)
        wait_for(lambda: in_flight(server) == 0)
    server.wait_printed("do not read their answers are disconnected")


def test_a_client_that_reads_too_slowly_in_all_is_disconnected(server, wait_for):
    before = disconnected(server)
    with client(server) as connection, contextlib.suppress(OSError):
        connection.sendall(request(b"whole"))
        while connection.recv(4000) and disconnected(server) == before:
            time.sleep(0.01)  # 0.4 MB/s at most, without any pause of a second
    assert disconnected(server) == before + 1
    wait_for(lambda: in_flight(server) == 0)


def test_a_client_that_reads_fast_enough_stays(server):
    before = disconnected(server)
    with client(server) as connection:
        for body in (b"whole", b"stream", b"whole"):
            connection.sendall(request(body))
            assert received(connection) > SIZE
    assert (disconnected(server), in_flight(server)) == (before, 0)


def received(connection):
    """How many bytes an answer has, read to its end."""
    answer = connection.recv(65536)
    head, _, rest = answer.partition(b"\r\n\r\n")
    length = dict(line.lower().split(b": ") for line in head.split(b"\r\n")[1:]).get(
        b"content-length"
    )
    size, end = len(rest), rest
    while size < int(length) if length else not end.endswith(b"\r\n0\r\n\r\n"):
        data = connection.recv(65536)
        assert data
        size, end = size + len(data), (end + data)[-10:]
    return len(head) + size
