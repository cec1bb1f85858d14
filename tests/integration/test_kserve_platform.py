"""KServe: its pod, with the image, arguments, mounts and user that it has there, and its clients.

What KServe's wrapper gave is compared with the answers that TorchServe's tests of it expect.
"""

import json
import sys
from pathlib import Path

import pytest
import yaml
from deploy.container import Container
from servers import make_archive, wait_for

pytestmark = [pytest.mark.integration, pytest.mark.containers, pytest.mark.environments]

ROOT = Path(__file__).parents[2]
CLIENT = Path(__file__).with_name("clients") / "kserve_platform.py"
RUNTIME = yaml.safe_load((ROOT / "deploy" / "kserve" / "runtime.yaml").read_text())
(KSERVE_CONTAINER,) = RUNTIME["spec"]["containers"]
ARGUMENTS = KSERVE_CONTAINER["args"]
# The example of TorchServe's README for KServe, but for the names.
MODELS = {
    "digits": {
        "1.0": {
            "defaultVersion": True,
            "marName": "digits.mar",
            "minWorkers": 1,
            "maxWorkers": 1,
            "batchSize": 1,
            "maxBatchDelay": 10,
            "responseTimeout": 120,
        }
    }
}
SNAPSHOT = {"name": "startup.cfg", "modelCount": 1, "models": MODELS}
PROPERTIES = f"""
inference_address=http://0.0.0.0:8085
management_address=http://0.0.0.0:8085
metrics_address=http://0.0.0.0:8082
grpc_inference_port=7070
grpc_management_port=7071
enable_envvars_config=true
install_py_dep_per_model=true
enable_metrics_api=true
metrics_mode=prometheus
NUM_WORKERS=1
number_of_netty_threads=4
job_queue_size=10
preload_modules=
model_store=/mnt/models/model-store
model_snapshot={json.dumps(SNAPSHOT)}
"""
# As TorchServe's MNIST: the class of the largest number, explained by the numbers.
DIGITS = """
import pathlib
import time


class Digits:
    def initialize(self, context):
        while not pathlib.Path("/shared/go").exists():
            time.sleep(0.01)
        self.initialized = True

    def handle(self, data, context):
        rows = [row["data"] for row in data]
        if context.get_request_header(0, "explain") == "True":
            return rows
        return [row.index(max(row)) for row in rows]
"""
CONNECT = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), 5).close()
except OSError:
    sys.exit(1)
"""


@pytest.fixture
def pod(tmp_path):
    """A pod of an InferenceService that is not running yet."""
    made = Container(tmp_path)
    models = tmp_path / "models"
    for name in ("config", "model-store"):
        (models / name).mkdir(parents=True)
    (models / "config" / "config.properties").write_text(PROPERTIES)
    make_archive(models / "model-store", DIGITS, "digits")
    made.mounts[models] = Path("/mnt/models")
    yield made
    made.close()


def is_open(pod: Container, port: int, host: str = "127.0.0.1") -> bool:
    return pod.run_beside(sys.executable, "-IS", "-c", CONNECT, host, str(port)).returncode == 0


def wait_open(pod: Container, port: int) -> None:
    wait_for(lambda: is_open(pod, port), what=pod.text)


def ask(pod: Container, path: str, document: object = None) -> object:
    method, body = ("GET", "") if document is None else ("POST", json.dumps(document))
    status, text = pod.ask(method, path, body)
    return json.loads(text) if status == 200 else (status, text)


def test_nobody_can_connect_before_the_model_is_ready_and_v1_is_served_then(pod, client_python):
    # As KServe's older versions start it, which say nothing of a platform.
    arguments = [each for each in ARGUMENTS if not each.startswith("--platform")]
    pod.run(*arguments, TS_SERVICE_ENVELOPE="kserve", PROTOCOL_VERSION="v1")
    wait_open(pod, 8085)
    assert pod.ask("GET", "/ready", port=8085)[0] == 503
    assert not is_open(pod, 8080)
    assert not is_open(pod, 8081)

    (pod.shared / "go").touch()
    wait_open(pod, 8080)
    assert is_open(pod, 8081)
    assert ask(pod, "/") == {"status": "alive"}
    assert ask(pod, "/v1/models")["models"] == ["digits"]
    found = ask(pod, "/v1/models/digits")
    assert (found["name"], found["ready"], found["id"]) == ("digits", True, "digits")
    status, text = pod.ask("GET", "/v1/models/nobody")
    assert (status, json.loads(text)["error"]) == (404, "Model not found: nobody")
    answer = ask(pod, "/v1/models/digits:predict", {"instances": [{"data": [0, 7, 1]}]})
    assert answer == {"predictions": [1]}
    answer = ask(pod, "/v1/models/digits:explain", {"instances": [{"data": [0, 7, 1]}]})
    assert answer == {"explanations": [[0, 7, 1]]}
    done = pod.run_beside(str(client_python), str(CLIENT), "v1")
    assert done.returncode == 0, done.stderr

    # Metrics for Prometheus; management for this pod alone.
    assert is_open(pod, 8082, "127.0.0.2")
    assert is_open(pod, 8080, "127.0.0.2")
    assert not is_open(pod, 8085, "127.0.0.2")
    assert '"READY"' in pod.ask("GET", "/models/digits", port=8085)[1]
    pod.send()
    assert pod.wait() == 0


def test_v2_over_http_and_grpc(pod, client_python):
    (pod.shared / "go").touch()
    pod.run(*ARGUMENTS, TS_SERVICE_ENVELOPE="kservev2", PROTOCOL_VERSION="v2")
    wait_open(pod, 8080)
    assert ask(pod, "/v2/health/ready") == {"ready": True}
    assert ask(pod, "/v2/health/live") == {"live": True}
    tensor = {"name": "input-0", "shape": [3], "datatype": "FP32", "data": [0.0, 0.5, 0.25]}
    request = {"id": "d3b15cad-50a2-4eaf-80ce-8b0a428bd298", "inputs": [tensor]}
    assert ask(pod, "/v2/models/digits/infer", request) == {
        "id": "d3b15cad-50a2-4eaf-80ce-8b0a428bd298",
        "model_name": "digits",
        "model_version": "1.0",
        "outputs": [{"name": "input-0", "datatype": "INT64", "data": [1], "shape": [1]}],
    }
    done = pod.run_beside(str(client_python), str(CLIENT), "v2")
    assert done.returncode == 0, done.stderr


def test_a_model_that_cannot_be_loaded_keeps_the_pod_out_of_the_service(pod, tmp_path):
    (tmp_path / "models" / "model-store" / "digits.mar").write_text("no archive")
    pod.run(*ARGUMENTS, TS_SERVICE_ENVELOPE="kserve", PROTOCOL_VERSION="v1")
    wait_open(pod, 8085)
    assert json.loads(pod.ask("GET", "/ready", port=8085)[1])["models"] == ["digits"]
    assert not is_open(pod, 8080)
    assert "Failed to load model: digits.mar" in pod.text()


def test_a_port_that_another_container_of_the_pod_has_ends_the_server(pod):
    pod.files["/entry.sh"] = (
        "#!/bin/bash\n/home/venv/bin/python -m http.server 8081 & exec "
        'marserve-init /usr/local/bin/dockerd-entrypoint.sh "$@"\n'
    )
    (pod.shared / "go").touch()
    pod.run(*ARGUMENTS, entrypoint=["/entry.sh"], TS_SERVICE_ENVELOPE="kserve")
    assert pod.wait(60) != 0
    assert "Cannot listen at grpc://0.0.0.0:8081" in pod.text()


def test_the_runtime_is_that_of_kserve_but_for_image_and_platform():
    assert RUNTIME["metadata"]["name"] == "kserve-torchserve"
    assert ARGUMENTS == [
        "torchserve",
        "--start",
        "--platform=kserve",
        "--model-store=/mnt/models/model-store",
        "--ts-config=/mnt/models/config/config.properties",
    ]
    security = KSERVE_CONTAINER["securityContext"]
    assert (security["runAsUser"], security["runAsNonRoot"]) == (1000, True)
    assert security["capabilities"] == {"drop": ["ALL"]}
    variables = {each["name"]: each["value"] for each in KSERVE_CONTAINER["env"]}
    assert variables == {"TS_SERVICE_ENVELOPE": "{{.Labels.serviceEnvelope}}"}
