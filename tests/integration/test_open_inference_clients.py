"""The clients of the Open Inference Protocol that people have, unmodified, and a real server."""

import functools
import json
import re
import subprocess
from pathlib import Path

import pytest
from servers import make_archive

pytestmark = [pytest.mark.integration, pytest.mark.environments]

CLIENTS = Path(__file__).with_name("clients")
SCRIPTS = ("triton_http.py", "triton_grpc.py", "kserve_sdk.py")
MODELS = ("echo", "arrays", "plain", "label", "wrong", "pieces", "sequence", "slow")
DECLARED = """
openInference:
  inputs:
    - {name: x, datatype: FP32, shape: [-1, 3]}
  outputs:
    - {name: y, datatype: BYTES, shape: [1]}
"""
# Requests in JSON are documents of the protocol, too.
ANY_INPUTS = "openInference: {arrays: false}\n"


def checks_of(script: str) -> list[str]:
    return re.findall(r"^def (check_\w+)", (CLIENTS / script).read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def server(share_server):
    with share_server(ts_open_inference_protocol="true") as shared:
        for name in MODELS:
            shared.install(CLIENTS / "tensors_handler.py", name)
        shared.install(CLIENTS / "tensors_handler.py", "plain-declared", config=DECLARED)
        for name in ("echo-any", "plain-any"):
            shared.install(CLIENTS / "tensors_handler.py", name, config=ANY_INPUTS)
        shared.install(CLIENTS / "declaring_handler.py", "declaring")
        make_archive(shared.store, CLIENTS / "tensors_handler.py", "later")
        yield shared


ENVELOPED = """
def handle(data, context):
    return data and [each["data"] for each in data]
"""


@pytest.fixture(scope="module")
def enveloped(start_server):
    with start_server(ts_open_inference_protocol="true", service_envelope="kservev2") as shared:
        shared.install(ENVELOPED, "m")
        yield shared


@pytest.mark.parametrize("check", checks_of("enveloped.py"))
def test_a_handler_in_an_envelope(check, client_python, enveloped):
    outcome = run_script(client_python, "enveloped.py", enveloped)[check]
    assert not outcome, outcome


def run_script(python: Path, script: str, server) -> dict[str, str]:
    ports = {**server.ports, **{f"grpc_{name}": port for name, port in server.grpc_ports.items()}}
    addresses = {name: f"127.0.0.1:{port}" for name, port in ports.items()}
    done = subprocess.run(
        [python, CLIENTS / script, json.dumps(addresses)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def outcomes(client_python, server):
    """What became of each check of a script, which is run once."""
    return functools.cache(lambda script: run_script(client_python, script, server))


@pytest.mark.parametrize(
    ("script", "check"),
    [(script, check) for script in SCRIPTS for check in checks_of(script)],
)
def test_unmodified(script, check, outcomes):
    outcome = outcomes(script)[check]
    assert not outcome, outcome
