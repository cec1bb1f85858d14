"""Who may call the gRPC services, over which connections, and when they begin and end."""

import json
import re
import signal
import socket
import ssl
import threading

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_client import connected, failure, request
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from servers import read

from marserve.frontend.configuration import certificates
from marserve.frontend.security.tokens import REFUSED

pytestmark = pytest.mark.integration

REFUSAL = ("PERMISSION_DENIED", REFUSED)
PACKAGE = "org.pytorch.serve.grpc"


@pytest.fixture(scope="module")
def model(server, handlers):
    server.install(handlers / "parts.py", "m")
    return "m"


def orders(**given):
    return json.dumps(given).encode()


# -- tokens ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guarded(start_server):
    with start_server(disable_token_authorization="false") as server:
        yield server


def bearer(server, kind):
    keys = json.loads((server.directory / "key_file.json").read_text())
    return [("authorization", f"Bearer {keys[kind]['key']}")]


@pytest.mark.parametrize(
    ("listener", "service", "method", "right", "wrong"),
    [
        ("inference", "inference", "Ping", "inference", "management"),
        ("management", "management", "ListModels", "management", "inference"),
    ],
)
def test_each_listener_wants_its_key(guarded, listener, service, method, right, wrong):
    with connected(guarded, listener) as client:
        for metadata in ((), [("authorization", "Bearer x")], bearer(guarded, wrong)):
            assert failure(lambda sent=metadata: client.call(service, method, metadata=sent)) == (
                REFUSAL
            )
        assert client.call(service, method, metadata=bearer(guarded, right))
    guarded.wait_logged("access_log.log", f'"gRPC {PACKAGE}.{service}.')
    guarded.wait_logged("access_log.log", f'{method} HTTP/2.0" 7 ')


def test_without_its_key_no_call_but_health_and_reflection_is_answered(guarded):
    for listener in ("inference", "management"):
        with connected(guarded, listener) as client:
            assert client.call("health", "Check").status == 1
            described = ProtoReflectionDescriptorDatabase(client.channel)
            names = [name for name in described.get_services() if name.startswith(PACKAGE)]
            assert names
            for name in names:
                file = described.FindFileContainingSymbol(name)
                for service in file.service:
                    for method in service.method:
                        path = f"/{file.package}.{service.name}/{method.name}"
                        call = client.channel.stream_stream(path)
                        assert failure(lambda call=call: call(iter([b""]), timeout=10)) == REFUSAL


# -- health and reflection -------------------------------------------------------------------------


def test_health_follows_what_is_ready(server, model, handlers):
    with connected(server) as client:
        answers = client.call("health", "Watch", service="watched", timeout=None)
        assert next(answers).status == 3  # nothing has that name
        server.install(handlers / "parts.py", "watched", initial_workers=0)
        assert next(answers).status == 2
        server.management("PUT", "/models/watched", params={"min_worker": 1, "synchronous": "true"})
        assert next(answers).status == 1
        for name in ("", "m", "m/1.0", f"{PACKAGE}.inference.InferenceAPIsService"):
            assert client.call("health", "Check", service=name).status == 1
        assert failure(lambda: client.call("health", "Check", service="gone"))[0] == "NOT_FOUND"
        server.management("DELETE", "/models/watched")
        assert next(answers).status == 3
        answers.cancel()


def test_reflection_describes_every_service(server):
    found = set()
    for listener in ("inference", "management"):
        with connected(server, listener) as client:
            database = ProtoReflectionDescriptorDatabase(client.channel)
            pool = DescriptorPool(database)
            for name in database.get_services():
                found.add(name)
                if name.startswith((PACKAGE, "grpc.health")):
                    assert pool.FindServiceByName(name).methods
    assert {
        f"{PACKAGE}.inference.InferenceAPIsService",
        f"{PACKAGE}.management.ManagementAPIsService",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    } <= found


# -- the log and the metrics -----------------------------------------------------------------------


def test_calls_are_logged_and_counted_as_others_are(server, model):
    with connected(server) as client:
        name = f'{{model_name="{model}",model_version="default"'
        before = server.metrics("ts_inference_requests_total", "Requests2XX", "Requests5XX")
        client.predict(model, orders(id="1"), metadata=(("x-request-id", "order-7"),))
        failure(lambda: client.predict("gone"))
        failure(lambda: client.call("open_inference", "ModelMetadata", name="gone"))
        after = server.metrics("ts_inference_requests_total", "Requests2XX", "Requests5XX")
    counted = {key: value - before.get(key, 0) for key, value in after.items()}
    assert [n for key, n in counted.items() if name in key] == [1]
    assert [n for key, n in counted.items() if key.startswith("Requests5XX")] == [1]
    line = (
        rf"/127.0.0.1:\d+ \"gRPC {PACKAGE}.inference.InferenceAPIsService/Predictions HTTP/2.0\" "
    )
    server.wait_logged("access_log.log", "ModelMetadata HTTP")
    log = server.log("access_log.log")
    ids = r"request_id=[0-9a-f-]{36} client_request_id=order-7"
    assert re.search(line + rf"0 \d+ model={model} {ids}\n", log)
    assert re.search(line + r"13 \d+ model=gone\n", log)
    assert re.search(r'ModelMetadata HTTP/2.0" 5 \d+ model=gone\n', log)


# -- TLS -------------------------------------------------------------------------------------------


def write_identity(directory):
    pem = certificates.self_signed_pem()
    key, _, rest = pem.partition(b"-----END PRIVATE KEY-----\n")
    (directory / "key.pem").write_bytes(key + b"-----END PRIVATE KEY-----\n")
    (directory / "certificate.pem").write_bytes(rest)
    return rest


def test_tls_with_the_certificate_of_https_which_sighup_reads_again(prepare_server):
    with prepare_server(enable_grpc_ssl="true") as server:
        first = write_identity(server.directory)
        server.write_property("private_key_file", "key.pem")
        server.write_property("certificate_file", "certificate.pem")
        server.start()
        for listener in ("inference", "management"):
            trusted = grpc.ssl_channel_credentials(first)
            with connected(server, listener, trusted) as client:
                assert client.call("health", "Check").status == 1
        with connected(server) as plain:
            assert failure(lambda: plain.call("health", "Check", timeout=5))[0] == "UNAVAILABLE"
        second = write_identity(server.directory)
        server.terminate(signal.SIGHUP)
        server.wait_logged("ts_log.log", "the certificates were read again")
        with connected(server, "inference", grpc.ssl_channel_credentials(second)) as client:
            assert client.call("health", "Check").status == 1
        assert ssl.get_server_certificate(("127.0.0.1", server.grpc_ports["inference"])) in (
            second.decode()
        )
        server.stop()


def test_without_files_the_certificate_is_made_up(start_server):
    with start_server(enable_grpc_ssl="true") as server:
        address = ("127.0.0.1", server.grpc_ports["inference"])
        made_up = ssl.get_server_certificate(address).encode()
        with connected(server, "inference", grpc.ssl_channel_credentials(made_up)) as client:
            assert client.call("health", "Check").status == 1


def test_handshakes_that_fail_do_not_fill_the_console(prepare_server, wait_for):
    environment = {"GRPC_ENABLE_FORK_SUPPORT": "1"}
    with prepare_server(environment, enable_grpc_ssl="true") as server:
        server.start()
        wait_for(lambda: "Model server started." in server.console_text())
        before = server.console_text()
        for _ in range(20):
            address = ("127.0.0.1", server.grpc_ports["inference"])
            with socket.create_connection(address, timeout=20) as connection:
                connection.sendall(b"GET / HTTP/1.1\r\n\r\n" * 5)
                read(connection)
        assert server.console_text() == before
        source = (
            "import os\ndef handle(d, c):\n    return d and [os.environ.get(N, '-')] * len(d)\n"
        )
        server.install(source.replace("N", "'GRPC_ENABLE_FORK_SUPPORT'"), "theirs")
        server.install(source.replace("N", "'GRPC_VERBOSITY'"), "none")
        assert [server.predict(name).text for name in ("theirs", "none")] == ["1", "-"]
        server.stop()


# -- limits ----------------------------------------------------------------------------------------


def test_no_more_calls_than_allowed_are_open(start_server, handlers, make_gate):
    with start_server(grpc_max_calls="2") as server, connected(server) as client:
        server.install(handlers / "parts.py", "m")
        gate = make_gate()
        body = orders(id="x", gate=gate.path)
        predict = client.method("inference", "Predictions").future
        calls = [predict(request("m", body)) for _ in range(2)]
        gate.wait_entered()
        server.wait_queued("m", 1)
        code, text = failure(lambda: client.call("inference", "Ping"))
        assert (code, text) == (
            "RESOURCE_EXHAUSTED",
            "2 calls are open, as many as grpc_max_calls allows.",
        )
        gate.open_for_all()
        assert [call.result().prediction for call in calls] == [b"x"] * 2
        assert client.call("inference", "Ping")
        (reached,) = server.metrics("marserve_limits_reached_total").items()
        assert 'limit="grpc_max_calls"' in reached[0]


def test_large_requests_count_for_the_bytes_in_flight(start_server, handlers, make_gate):
    limits = {"max_request_size": "300000", "max_bytes_in_flight": "300000"}
    with start_server(**limits) as server, connected(server) as client:
        server.install(handlers / "parts.py", "m")
        gate = make_gate()
        inputs = {"data": orders(id="x", gate=gate.path), "much": bytes(200_000)}
        predict = client.method("inference", "Predictions").future
        call = predict(request("m", input=inputs))
        gate.wait_entered()
        assert failure(lambda: client.predict("m", input=inputs))[0] == "UNAVAILABLE"
        requests = iter([request("m", input=inputs, sequence_id="s")])
        (refused,) = client.method("inference", "StreamPredictions2")(requests)
        assert refused.status.code == grpc.StatusCode.UNAVAILABLE.value[0]
        gate.open_for_all()
        assert call.result().prediction == b"x"
        assert client.predict("m", input={**inputs, "data": b'{"id": "y"}'}) == b"y"


def test_no_more_connections_than_allowed_are_open(start_server):
    with start_server(max_connections="1") as server, connected(server) as client:
        assert client.call("health", "Check").status == 1
        with connected(server, use_local_subchannel_pool=1) as second:
            assert failure(lambda: second.call("health", "Check", timeout=5))[0] == "UNAVAILABLE"
        assert client.call("health", "Check").status == 1


def test_who_connects_and_says_nothing_is_disconnected(start_server):
    with (
        start_server(request_head_timeout="0.5") as server,
        socket.create_connection(("127.0.0.1", server.grpc_ports["inference"])) as silent,
    ):
        silent.settimeout(20)
        assert read(silent)[3:4] in (b"", b"\x04")  # settings, and the end


def test_connections_grow_no_older_than_allowed(start_server, handlers):
    ages = {"grpc_inference_max_connection_age_ms": "300"}
    with start_server(**ages) as server, connected(server) as client:
        server.install(handlers / "parts.py", "m")
        gone = threading.Event()
        client.channel.subscribe(
            lambda state: gone.set() if state == grpc.ChannelConnectivity.IDLE else None,
            try_to_connect=False,
        )
        assert client.predict("m", orders(id="1")) == b"1"
        assert gone.wait(20)
        assert client.predict("m", orders(id="2")) == b"2"


def test_a_client_that_reads_nothing_fills_no_memory(start_server, handlers):
    """Its answer is broken off; the worker goes on at once."""
    with start_server(max_stream_backlog="1000000") as server, connected(server) as client:
        server.install(handlers / "parts.py", "m")
        answers = client.stream("m", orders(pieces=100, size=100_000))
        server.wait_taken("m", 0)
        assert client.predict("m", orders(id="next")) == b"next"
        code, text = failure(lambda: answers)
        assert (code, text.splitlines()[0]) == ("INTERNAL", "the client is too slow")


REFUSES = """
from ts.handler_utils.utils import send_intermediate_predict_response

def handle(data, context):
    if data is None:
        return None
    context.set_response_status(404, "Not Found", 0)
    if "stream" in data[0]:
        send_intermediate_predict_response(["no"], context.request_ids, "", 200, context)
    return [{"code": 404, "message": "no such colour"}]
"""


@pytest.mark.parametrize("flag", ["false", "true"])
def test_the_refusal_of_a_handler_is_a_status_where_that_is_configured(start_server, flag):
    with start_server(grpc_handler_status=flag) as server, connected(server) as client:
        server.install(REFUSES, "m")
        if flag == "false":
            assert json.loads(client.predict("m"))["code"] == 404
            assert json.loads(next(client.stream("m")).prediction)["code"] == 404
        else:
            refusal = (
                "NOT_FOUND",
                "no such colour\norg.pytorch.serve.http.InternalServerException",
            )
            assert failure(lambda: client.predict("m")) == refusal
            assert failure(lambda: client.stream("m")) == refusal
            assert failure(lambda: client.stream("m", input={"stream": b""}))[0] == "NOT_FOUND"


@pytest.mark.parametrize("algorithm", ["none", "deflate", "gzip"])
def test_answers_are_compressed_for_who_understands_that(start_server, handlers, algorithm):
    with start_server(grpc_compression=algorithm) as server:
        server.install(handlers / "parts.py", "m")
        for number in (0, 1, 2):
            with connected(server, default_compression_algorithm=number) as client:
                assert len(client.predict("m", orders(size=100_000))) == 100_000


# -- start and stop --------------------------------------------------------------------------------


def test_a_port_in_use_ends_the_start_with_a_sentence(server, prepare_server):
    taken = server.grpc_ports["management"]
    with prepare_server(grpc_management_port=str(taken)) as second:
        assert second.launch().wait(20) == 1
        second.wait_printed(f"Cannot listen at grpc://127.0.0.1:{taken}")
        assert "Traceback" not in second.console_text()


def test_port_0_lets_the_system_choose(start_server):
    with start_server(grpc_inference_port="0") as server:
        server.wait_printed(said := "gRPC Inference API bind to: grpc://127.0.0.1:")
        port = int(server.console_text().partition(said)[2].split()[0])
        server.grpc_ports["inference"] = port
        with connected(server) as client:
            assert client.call("health", "Check").status == 1


def test_without_its_packages_a_line_says_so(prepare_server, tmp_path):
    (tmp_path / "grpc.py").write_text("raise ImportError('No module named grpc')\n")
    with prepare_server({"PYTHONPATH": str(tmp_path)}, enable_grpc="true") as server:
        server.start()
        packages = "grpcio grpcio-reflection protobuf"
        text = f"gRPC is not served: No module named grpc. To have it: pip install {packages}"
        server.wait_printed(f"[WARN ] main marserve.frontend.server - {text}")
        server.stop()


def test_it_can_be_switched_off(start_server):
    with start_server(enable_grpc="false") as server, connected(server) as client:
        assert failure(lambda: client.call("health", "Check", timeout=5))[0] == "UNAVAILABLE"
        assert "gRPC" not in server.console_text()


def test_a_stop_answers_what_was_accepted_and_ends_idle_streams(start_server, handlers, make_gate):
    with start_server() as server, connected(server) as client:
        server.install(handlers / "parts.py", "m")
        gate = make_gate()
        held = client.method("inference", "Predictions").future(
            request("m", orders(id="held", gate=gate.path))
        )
        watched = client.call("health", "Watch", timeout=None)
        assert next(watched).status == 1
        idle, never = client.method("inference", "StreamPredictions2"), threading.Event()

        def requests():
            yield request("m", orders(id="first"), sequence_id="s")
            never.wait(30)

        gate.wait_entered()
        answers = idle(requests())
        server.wait_queued("m", 1)
        server.terminate()
        assert [each.status for each in watched] == [2]
        server.wait_logged("ts_log.log", "Stopping; accepted requests")
        gate.open()
        assert held.result().prediction == b"held"
        assert next(answers).prediction == b"first"
        assert failure(lambda: next(answers)) == (
            "UNAVAILABLE",
            "The server is stopping.\norg.pytorch.serve.http.ServiceUnavailableException",
        )
        never.set()
        server.wait_stopped()


def test_before_it_stops_it_says_that_it_is_not_serving(start_server):
    with start_server(lame_duck_seconds="20") as server, connected(server) as client:
        assert client.call("health", "Check").status == 1
        server.terminate()
        server.wait_logged("ts_log.log", "/ready says 503 from now on")
        assert client.call("health", "Check").status == 2
        server.terminate()
        server.wait_stopped()


def test_a_call_that_never_ends_does_not_keep_the_server(start_server, handlers, make_gate):
    with start_server(drain_timeout="1") as server, connected(server) as client:
        server.install(handlers / "parts.py", "m")
        gate = make_gate()
        held = client.method("inference", "Predictions").future(
            request("m", orders(id="held", gate=gate.path))
        )
        gate.wait_entered()
        server.terminate()
        assert failure(held.result)[0] in ("INTERNAL", "UNAVAILABLE")
        server.wait_stopped()


def test_a_worker_has_no_grpc(server):
    source = (
        "import sys\n"
        "def handle(d, c):\n"
        "    return d and [str('grpc' in sys.modules or 'google' in sys.modules)] * len(d)\n"
    )
    server.install(source, "looking")
    with connected(server) as client:
        assert client.predict("looking") == b"False"
