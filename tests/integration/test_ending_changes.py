"""The end of a server, and of models, in the middle of something."""

import socket

import pytest
import requests

pytestmark = pytest.mark.integration

FORKING = """
import os, time
def handle(data, context):
    if data is None:
        return
    if data[0]["body"] == b"fork" and os.fork() == 0:
        time.sleep(1)
        return [b"from the child"]
    if data[0]["body"] == b"wait":
        time.sleep(2)
    return [b"from the parent"]
"""

DAEMON = """
import os, time
def handle(data, context):
    if data is None:
        return
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(20)
        os._exit(0)
    return [b"ok"]
"""


def is_refused(server):
    try:
        answer = server.predict("lab", json={"id": "late"}, timeout=0.3)
    except requests.Timeout:  # it was taken in; hanging up takes it out again
        return False
    return answer.status_code in (404, 503)


@pytest.mark.parametrize(
    ("method", "query"), [("DELETE", ""), ("PUT", "?min_worker=0&synchronous=true")]
)
def test_stopping_while_a_model_is_leaving(
    start_server, handlers, background, gate, wait_for, method, query
):
    with start_server() as server:
        server.install(handlers / "lab.py", "lab")
        running = background(server.ask, "lab", id="running", gate=gate.path)
        gate.wait_entered()
        leaving = background(server.management, method, f"/models/lab{query}")
        # It has begun when new requests are refused.
        wait_for(lambda: is_refused(server))
        server.terminate()
        server.wait_logged("ts_log.log", "Stopping;")
        gate.open()
        assert running.result().json()["id"] == "running"
        leaving.exception()
        server.wait_stopped()


def test_scaling_to_none_serves_the_queue_first(start_server, handlers, background, gate, wait_for):
    with start_server() as server:
        server.install(handlers / "lab.py", "lab")
        running = background(server.ask, "lab", id="running", gate=gate.path)
        gate.wait_entered()
        queued = background(server.ask, "lab", id="queued")
        server.wait_queued("lab", 1)
        scaling = background(server.management, "PUT", "/models/lab?min_worker=0&synchronous=true")
        wait_for(lambda: is_refused(server))
        gate.open()
        assert running.result().json()["id"] == "running"
        assert queued.result().json()["id"] == "queued"
        assert scaling.result().status_code == 200


def test_a_child_of_a_handler_answers_nobody(start_server, background):
    with start_server() as server:
        server.install(FORKING, "forking")
        assert server.predict("forking", data=b"fork").content == b"from the parent"
        waiting = background(server.predict, "forking", data=b"wait")
        assert waiting.result().content == b"from the parent"


def test_a_daemon_of_a_handler_holds_nobody_up(prepare_server):
    with prepare_server() as server:
        server.start()
        server.install(DAEMON, "daemon")
        assert server.predict("daemon", data=b"x").content == b"ok"
        server.terminate()
        assert server.process is not None
        assert server.process.wait(8) == 0


def test_all_listeners_may_share_one_address(prepare_server):
    with prepare_server() as server:
        address = f"http://127.0.0.1:{server.ports['inference']}"
        server.ports = dict.fromkeys(server.ports, server.ports["inference"])
        properties = server.directory / "config.properties"
        lines = [
            line
            for line in properties.read_text().splitlines()
            if not line.partition("=")[0].endswith("_address")
        ]
        lines += [
            f"{listener}_address={address}" for listener in ("inference", "management", "metrics")
        ]
        properties.write_text("\n".join(lines))
        server.start()
        assert server.inference("GET", "/ping").status_code == 200
        assert server.management("GET", "/models").json()["models"] == []
        assert server.metrics("Requests2XX")
        server.stop()


def test_numbers_beyond_all_sense(start_server, handlers):
    with start_server() as server:
        server.install(handlers / "lab.py", "lab")
        for name, value in {"max_batch_delay": "9" * 400, "response_timeout": "9" * 99}.items():
            answer = server.register("archive-of-lab.mar", **{name: value})
            assert answer.status_code == 400
            assert answer.json()["message"].startswith(f"{name}=999")
        assert server.ask("lab", id="a").status_code == 200
        answer = server.management("PUT", "/models/lab?min_worker=100000")
        assert (answer.status_code, answer.json()["type"]) == (400, "BadRequestException")


def test_a_client_cannot_order_a_description_for_its_batch_mates(start_server):
    handler = "def handle(data, context):\n  return data and [context.get_all_request_header(0)]\n"
    with start_server() as server:
        server.install(handler, "headers")
        headers = server.predict("headers", data=b"x", headers={"describe": "True"}).json()
        assert "describe" not in headers


def test_stopping_while_a_model_is_still_being_fetched(prepare_server):
    with prepare_server() as server, socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        server.write_property("load_models", f"http://127.0.0.1:{port}/slow.mar")
        process = server.launch()
        peer, _ = silent.accept()
        with peer:
            peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
            server.wait_logged("ts_log.log", "Configuration file:")
            server.terminate()
            server.wait_logged("ts_log.log", "Stopping;")
            peer.sendall(b"x")
            assert process.wait(10) == 0
        assert list(server.store.iterdir()) == []


def test_what_the_listeners_serve_is_described(start_server, handlers):
    with start_server() as server:
        server.install(handlers / "lab.py", "lab")
        for ask in (server.inference, server.management):
            assert ask("OPTIONS", "/").json()["openapi"] == "3.0.1"
            assert ask("GET", "/api-description").json()["info"]["title"] == "marserve APIs"
            assert ask("GET", "/").status_code == 405
        described = server.inference("OPTIONS", "/predictions/lab").json()
        assert "/predictions/lab" in described["paths"]
        assert server.management("OPTIONS", "/models/nobody").status_code == 404
