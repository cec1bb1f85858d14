"""``--url``: our own server, and what TorchServe's answers look like."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from servers import Server

from marserve.tools.doctor.main import main

ECHO = "def handle(data, context):\n    return [str(row) for row in data or []]\n"
TOKEN = "Token Authorization failed. Token either incorrect, expired, or not provided correctly"


@pytest.mark.integration
def test_a_server_of_ours(start_server, capsys):
    switches = {"enable_model_api": "true", "disable_token_authorization": "false"}
    with start_server(**switches) as server:
        key_file = server.directory / "key_file.json"
        key = json.loads(key_file.read_text())["management"]["key"]
        headers = {"Authorization": f"Bearer {key}"}
        assert isinstance(server, Server)
        archive = make(server)
        query = {"url": archive.name, "initial_workers": 2, "synchronous": "true"}
        assert server.management("POST", "/models", params=query, headers=headers).ok
        url = f"http://127.0.0.1:{server.ports['management']}"
        metrics = f"http://127.0.0.1:{server.ports['metrics']}"
        assert main(["--url", url]) == 2
        assert "--key-file" in capsys.readouterr().err
        for access in (["--token", key], ["--key-file", str(key_file)]):
            assert main(["--url", url, *access, "--metrics-url", metrics, "--json"]) == 0
            document = json.loads(capsys.readouterr().out)
            assert document["read"][1:] == ["echo 1.0"]
            found = [each for each in document["findings"] if each["level"] != "works"]
            assert [each["rule"] for each in found] == ["batching"]


def make(server: Server) -> Path:
    from servers import make_archive

    return make_archive(server.store, ECHO, "echo")


@contextmanager
def torchserve(models: dict[str, dict[str, Any]], metrics: str = "") -> Iterator[str]:
    """What answers as a TorchServe with a plugin does; its key is "key"."""
    names = sorted(models)

    class Answers(BaseHTTPRequestHandler):
        def do_OPTIONS(self) -> None:
            paths = {"/models": {"get": {}, "post": {}}, "/execution-parameters": {"get": {}}}
            self.answer({"info": {"title": "TorchServe APIs", "version": "0.12.0"}, "paths": paths})

        def do_GET(self) -> None:
            path, _, query = self.path.partition("?")
            if path == "/metrics":
                self.answer(metrics)
            elif self.headers["Authorization"] != "Bearer key":
                self.answer({"code": 400, "type": "InvalidKeyException", "message": TOKEN}, 400)
            elif path == "/models":  # one on each page
                at = int(query.partition("next_page_token=")[2] or 0)
                page = {"models": [{"modelName": names[at], "modelUrl": "m.mar"}]}
                more = {"nextPageToken": str(at + 1)} if at + 1 < len(names) else {}
                self.answer(page | more)
            else:
                name = path.split("/")[2]
                self.answer([{"modelName": name, "modelVersion": "1.0", **models[name]}])

        def answer(self, document: Any, status: int = 200) -> None:
            text = document if isinstance(document, str) else json.dumps(document)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_torchserve(capsys):
    ready = [{"status": "READY"}] * 3
    models = {
        "a": {"batchSize": 1, "minWorkers": 3, "workers": ready},
        "b": {"batchSize": 8, "minWorkers": 3, "workers": ready},
        "c": {"batchSize": 1, "minWorkers": 1, "workers": [{"status": "UNLOADED"}]},
        "d": {"batchSize": 1, "minWorkers": 1, "workers": ready, "runtime": "LSP"},
        "e": {"crashLoop": 4, "workers": [*ready, {"status": "READY", "lastError": "By SIGSEGV."}]},
    }
    metrics = (
        "# TYPE Requests2XX counter\nRequests2XX{Level=\"Host\"} 40\n"
        "# TYPE OurMetric gauge\nOurMetric{Level=\"Model\"} 1\n"
        "# TYPE ts_inference_requests_total counter\n"
        "ts_inference_requests_total{model_name=\"b\",model_version=\"1.0\"} 100\n"
        "# TYPE ts_inference_latency_microseconds counter\n"
        "ts_inference_latency_microseconds{model_name=\"b\",model_version=\"1.0\"} 9000000\n"
        "# TYPE ts_queue_latency_microseconds counter\n"
        "ts_queue_latency_microseconds{model_name=\"b\",model_version=\"1.0\"} 6000000\n"
    )  # fmt: skip
    with torchserve(models, metrics) as url:
        assert main(["--url", url]) == 2
        assert "requires its management key" in capsys.readouterr().err
        assert main(["--url", url, "--token", "key", "--metrics-url", url]) == 1
        printed = capsys.readouterr().out
    for line in (
        "  d 1.0: d is for TorchServe's C++ backend. [runtime]",
        "  e 1.0: The workers of e have failed 4 times in the last minutes: By SIGSEGV. ",
        "  c 1.0: c has no worker that is READY. [model-not-ready]",
        f"  {url}: 1 metrics are not built in: OurMetric [custom-metrics]",
        f"  {url}: GET /execution-parameters is not served: it may belong to a plugin. [endpoint]",
        "  a 1.0: a has 3 workers and batches of 1. [batching]",
        f"  {url}: Requests of b wait 60 ms of the 90 ms that they take. [queueing]",
    ):
        assert line in printed


@pytest.mark.parametrize(("count", "waited"), [("Inf", "Inf"), ("100", "Inf"), ("Inf", "100")])
def test_metrics_without_an_average(count, waited, capsys):
    metrics = (
        f'ts_inference_requests_total{{model_name="b"}} {count}\n'
        'ts_inference_latency_microseconds{model_name="b"} 100\n'
        f'ts_queue_latency_microseconds{{model_name="b"}} {waited}\n'
    )
    with torchserve({"b": {}}, metrics) as url:
        assert main(["--url", url, "--token", "key", "--metrics-url", url]) == 0
    assert "[queueing]" not in capsys.readouterr().out


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "nonsense", "http://localhost:0"])
def test_nobody_answers(url, capsys):
    assert main(["--url", url]) == 2
    assert capsys.readouterr().err.startswith("marserve doctor: ")
