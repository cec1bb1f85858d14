"""A server with little address space (``ulimit -v``)."""

import contextlib
import resource

import psutil
import pytest

pytestmark = pytest.mark.integration

MIB = 1 << 20
HEAD = b"POST /predictions/m HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n"


def test_a_request_that_memory_runs_out_for_is_ended_and_the_server_goes_on(start_server):
    with start_server(max_request_size="1000000000", request_body_timeout="2") as server:
        server.install("def handle(d, c):\n    return d and ['in'] * len(d)\n", "m")
        used = psutil.Process(server.process.pid).memory_info().vms
        limit = (used + 200 * MIB, resource.RLIM_INFINITY)
        resource.prlimit(server.process.pid, resource.RLIMIT_AS, limit)
        with server.connect("inference") as client, contextlib.suppress(ConnectionError):
            # Once it is collected for a second, which is more than is left; the end does not come.
            client.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % (150 * MIB + 1))
            client.sendall(bytes(150 * MIB))
            assert client.recv(65536)[:12] in (b"", b"HTTP/1.1 408", b"HTTP/1.1 507")
        assert server.predict("m", data=b"x").text == "in"
        whole = [b"x" * MIB] * 300
        with contextlib.suppress(OSError):
            assert server.predict("m", data=iter(whole)).status_code == 507
        assert server.predict("m", data=b"x").text == "in"


def test_a_large_body_that_memory_does_not_suffice_for_is_refused(start_server):
    with start_server(max_request_size="1000000000") as server:
        server.install("def handle(d, c):\n    return d and ['in'] * len(d)\n", "m")
        used = psutil.Process(server.process.pid).memory_info().vms
        limit = (used + 50 * MIB, resource.RLIM_INFINITY)
        resource.prlimit(server.process.pid, resource.RLIMIT_AS, limit)
        with server.connect("inference") as client:
            client.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % (150 * MIB))
            with contextlib.suppress(ConnectionError):
                client.sendall(bytes(150 * MIB))
            assert client.recv(65536).startswith(b"HTTP/1.1 507 ")
        assert server.predict("m", data=b"x").text == "in"
