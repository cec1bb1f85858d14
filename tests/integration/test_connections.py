"""Connections: more than a server can hold, and those of both versions of IP."""

import contextlib
import resource
import socket
import time
from pathlib import Path

import psutil
import pytest
import requests

pytestmark = pytest.mark.integration

BOTH_VERSIONS = Path("/proc/sys/net/ipv6/bindv6only")
LIMIT = 400  # file descriptors of a server
REQUEST = b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n"


def ping(connection):
    """What comes back on a kept connection."""
    connection.sendall(REQUEST)
    return connection.recv(65536)


def start_with_few_descriptors(server):
    server.launch()
    resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (LIMIT, LIMIT))
    server.wait_ready()


def test_running_out_of_descriptors_neither_stops_the_server_nor_makes_it_spin(
    prepare_server, make_archive, wait_for
):
    with prepare_server() as server, contextlib.ExitStack() as flood:
        start_with_few_descriptors(server)
        make_archive(server.store, "def handle(d, c):\n    return d and ['in'] * len(d)\n", "m")
        process = psutil.Process(server.process.pid)
        kept = flood.enter_context(server.connect("inference"))
        clients = [flood.enter_context(server.connect("inference")) for _ in range(300)]
        assert b"Healthy" in ping(kept)
        answers = []
        for client in clients:
            with contextlib.suppress(ConnectionError):
                answers.append(ping(client))
        served = sum(b"Healthy" in answer for answer in answers)
        assert 60 <= served <= 200  # a quarter is for gRPC
        assert process.num_fds() < LIMIT - 20
        server.wait_printed("file descriptors run short (ulimit -n)")

        # The other listener has places left, and there are descriptors to start a worker with.
        assert server.register("m.mar", initial_workers=1).status_code == 200
        kept.sendall(b"POST /predictions/m HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\n\r\nx")
        assert kept.recv(65536).endswith(b"\r\n\r\nin")

        before = sum(process.cpu_times()[:2])
        began = time.monotonic()
        wait_for(lambda: time.monotonic() - began > 1)
        assert sum(process.cpu_times()[:2]) - before < 0.5

        flood.close()
        wait_for(lambda: server_answers(server))
        assert server.predict("m", data=b"x").text == "in"


def test_connections_to_grpc_do_not_take_those_of_the_other_listeners(prepare_server, make_archive):
    """900 silent connections closed every listener, the operator's among them."""
    with prepare_server() as server, contextlib.ExitStack() as flood:
        make_archive(server.store, "def handle(d, c):\n    return d and ['in'] * len(d)\n", "m")
        start_with_few_descriptors(server)
        ports = [server.ports["inference"], *server.grpc_ports.values()]
        for port in ports:
            for _ in range(300):
                with contextlib.suppress(OSError):
                    flood.enter_context(socket.create_connection(("127.0.0.1", port), 1))
        assert server.management("GET", "/models").status_code == 200
        assert server.metrics()
        assert server.register("m.mar", initial_workers=1).status_code == 200


def server_answers(server):
    try:
        return server.inference("GET", "/ping").status_code == 200
    except OSError:
        return False


def test_no_more_connections_than_the_operator_allows(start_server, wait_for):
    with start_server(max_connections="2") as server, contextlib.ExitStack() as held:

        def hold():
            """A connection with a place; those that looked whether the server is up may linger."""
            client = server.connect("inference")
            with contextlib.suppress(ConnectionError):
                if b"Healthy" in ping(client):
                    return held.enter_context(client)
            client.close()
            return None

        first, second = wait_for(hold), wait_for(hold)
        with server.connect("inference") as third:
            assert third.recv(65536).startswith(b"HTTP/1.1 503 Service Unavailable")
        assert server.management("GET", "/models").status_code == 200
        assert b"Healthy" in ping(first)
        second.close()
        assert wait_for(hold)


@pytest.mark.skipif(
    not BOTH_VERSIONS.exists() or BOTH_VERSIONS.read_text().strip() != "0",
    reason="the system has no IPv6, or net.ipv6.bindv6only",
)
def test_an_address_of_all_interfaces_takes_both_versions_of_ip(prepare_server, handlers):
    with prepare_server() as server:
        for name in ("inference", "management", "metrics"):
            server.write_property(f"{name}_address", f"http://[::]:{server.ports[name]}")
        server.write_property("grpc_inference_address", "::")
        server.write_property("disable_token_authorization", "true")
        server.start()
        for host in ("127.0.0.1", "[::1]"):
            for port in (*server.ports.values(), server.grpc_ports["inference"]):
                socket.create_connection((host.strip("[]"), port), 10).close()
            url = f"http://{host}:{server.ports['inference']}/predictions/none"
            assert requests.get(url, timeout=10).status_code == 404
        server.wait_logged("access_log.log", "/127.0.0.1:")  # without the prefix of version 6
        assert "ffff" not in server.log("access_log.log")
