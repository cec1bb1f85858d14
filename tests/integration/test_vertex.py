"""Vertex AI: its variables, its routes, its storage, and the configurations that people bring."""

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from deploy.container import Container, image_words
from servers import Gate, Server, make_archive, wait_for

pytestmark = [pytest.mark.integration, pytest.mark.containers]

# What Vertex makes up for models that were uploaded without routes.
PREDICT = "/v1/endpoints/12/deployedModels/34:predict"
HEALTH = "/v1/endpoints/12/deployedModels/34"
TOKEN_PATH = "/computeMetadata/v1/instance/service-accounts/default/token"

LENGTHS = """
def handle(data, context):
    return data and [len(row["data"]) for row in data]
"""
GATED = """
class Handler:
    def initialize(self, context):
        open({gate!r}).close()
        self.initialized = True

    def handle(self, data, context):
        return data and [bytes(row["body"]).decode() for row in data]
"""


class Google(ThreadingHTTPServer):
    """A metadata server and a storage that lets in who has its token."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.objects = objects
        self.seen: list[tuple[str, str | None]] = []

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.server_port}"


class _Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        google = self.server
        assert isinstance(google, Google)
        token = self.headers.get("Authorization")
        if self.path == TOKEN_PATH and self.headers.get("Metadata-Flavor") == "Google":
            body = json.dumps({"access_token": "ya29.abc", "expires_in": 3599}).encode()
        else:
            google.seen.append((self.path, token))
            body = google.objects.get(self.path, b"") if token == "Bearer ya29.abc" else b""
        self.send_response(200 if body else 403)
        self.send_header("Metadata-Flavor", "Google")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def google(tmp_path):
    archive = make_archive(tmp_path, LENGTHS, "model").read_bytes()
    server = Google({"/bucket/upload%207/model.mar": archive})
    Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def on_vertex(server: Server, predict: str, health: str, **more: str) -> None:
    server.environment |= {
        "AIP_HTTP_PORT": str(server.ports["inference"]),
        "AIP_PREDICT_ROUTE": predict,
        "AIP_HEALTH_ROUTE": health,
        **more,
    }


def test_an_uploaded_model_is_fetched_and_asked_by_the_routes_that_vertex_made_up(
    prepare_server, google
):
    with prepare_server() as server:
        on_vertex(
            server,
            PREDICT,
            HEALTH,
            AIP_STORAGE_URI="gs://bucket/upload 7",
            STORAGE_EMULATOR_HOST=f"http://{google.host}",
            GCE_METADATA_HOST=google.host,
        )
        server.start()
        wait_for(lambda: server.inference("GET", HEALTH).ok, what=server.console_text)
        answer = server.inference(
            "POST", PREDICT, json={"instances": [{"data": "ab"}, {"data": ""}]}
        )
        assert answer.json() == {"predictions": [2, 0]}
        assert google.seen == [("/bucket/upload%207/model.mar", "Bearer ya29.abc")]
        platform = "Platform: Vertex AI (AIP_HTTP_PORT, AIP_PREDICT_ROUTE, AIP_HEA"
        server.wait_logged("ts_log.log", platform)
        # What is beside the routes is as it was.
        assert server.inference("POST", "/v1/models/model:predict", json={"instances": []}).ok
        assert server.inference("GET", f"{HEALTH}/x").status_code == 404
        server.stop()


def test_with_tokens_only_the_health_route_needs_no_key(prepare_server):
    with prepare_server(enable_envvars_config="true") as server:
        on_vertex(server, PREDICT, HEALTH, TS_DISABLE_TOKEN_AUTHORIZATION="false")
        make_archive(server.store, LENGTHS, "m")
        server.start("--models", "m=m.mar")
        wait_for(lambda: server.inference("GET", HEALTH).ok, what=server.console_text)
        key = json.loads((server.directory / "key_file.json").read_text())["inference"]["key"]
        headers = {"Authorization": f"Bearer {key}"}
        for path in (PREDICT, "/v1/models/m:predict"):  # the same first segment as the health route
            assert server.inference("POST", path, data={"data": "ab"}).status_code == 400
            assert server.inference("POST", path, data={"data": "ab"}, headers=headers).ok
        server.stop()


def test_the_image_without_a_command_serves_what_lies_in_a_directory(tmp_path):
    container = Container(tmp_path)
    try:
        models = tmp_path / "artifacts"
        models.mkdir()
        make_archive(models, LENGTHS, "model")
        container.mounts[models] = Path("/mnt/artifacts")
        told = {"AIP_HTTP_PORT": "7080", "AIP_PREDICT_ROUTE": PREDICT, "AIP_HEALTH_ROUTE": HEALTH}
        container.run(*image_words("CMD"), AIP_STORAGE_URI="/mnt/artifacts", **told)
        wait_for(lambda: container.ask("GET", HEALTH, port=7080)[0] == 200, what=container.text)
        body = json.dumps({"instances": [{"data": "abc"}]})
        status, text = container.ask("POST", PREDICT, body, port=7080)
        assert (status, json.loads(text)) == (200, {"predictions": [3]})
    finally:
        container.close()


def test_a_configuration_with_blanks_and_repeated_keys_and_its_prober(prepare_server, tmp_path):
    gate = Gate(tmp_path / "gate")
    with prepare_server(default_workers_per_model="1") as server:
        make_archive(server.store, GATED.format(gate=gate.path), "m")
        inference, management = server.ports["inference"], server.ports["management"]
        lines = [
            "inference_address=http://127.0.0.1:1",
            f"management_address=http://0.0.0.0:{management}",
            f"inference_address=http://0.0.0.0:{inference}",
            "load_models=none.mar",
            "load_models=m.mar",
        ]
        with (server.directory / "config.properties").open("a") as file:
            file.writelines(f"    {line}\n" for line in lines)
        on_vertex(server, "/predictions/m", "/ping")
        server.start()
        # The prober waits for a worker, and has no token.
        model = server.management("GET", "/models/m")
        assert (model.status_code, "READY" in model.text) == (200, False)
        gate.open()
        wait_for(lambda: "READY" in server.management("GET", "/models/m").text)
        assert server.inference("POST", "/predictions/m", data=b"x").text == "x"
        assert server.inference("GET", "/ping").ok
        server.stop()
    gate.close()


@pytest.mark.parametrize(("predict", "health"), [("/predict", "/health"), ("/", "/")])
def test_routes_of_their_own_ask_the_one_model_and_tell_when_it_can_answer(
    prepare_server, tmp_path, predict, health
):
    gate = Gate(tmp_path / "gate")
    with prepare_server(load_models="m.mar", default_workers_per_model="1") as server:
        make_archive(server.store, GATED.format(gate=gate.path), "m")
        make_archive(server.store, LENGTHS, "other")
        on_vertex(server, predict, health)
        server.start()
        assert server.inference("GET", health).status_code == 503
        gate.open()
        wait_for(lambda: server.inference("GET", health).ok)
        assert server.inference("POST", predict, data=b"x").text == "x"
        other = server.inference("POST", "/m/predict", data=b"y")
        assert (other.status_code, other.text) == (200, "y") or predict == "/"
        server.stop()
    gate.close()


@pytest.mark.parametrize("models", ["one.mar,two.mar", ""])
def test_a_route_that_names_no_model_needs_exactly_one(prepare_server, models):
    with prepare_server(load_models=models) as server:
        for name in ("one", "two"):
            make_archive(server.store, LENGTHS, name)
        on_vertex(server, "/predict", "/health")
        server.start()
        answer = server.inference("POST", "/predict", data=b"x")
        assert answer.status_code == 400
        assert ("one, two" if models else "none") in answer.json()["message"]
        server.stop()
