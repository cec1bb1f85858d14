"""Amazon's own toolkit with our server in TorchServe's place, for one model and for many."""

import io
import os
import re
import subprocess
import sys
import tarfile
import time
import zipfile

import numpy as np
import pytest
from control_groups import memory_group
from sagemaker_container import Container

pytestmark = [
    pytest.mark.integration,
    pytest.mark.containers,
    pytest.mark.environments,
    pytest.mark.timeout(300),
]

MEBIBYTE = 1 << 20
SMALL_MODELS = 6

ONE_MODEL = """
import json, os, time
import torch
from required_by_the_model import VERSION

def model_fn(model_dir):
    assert os.path.exists(os.path.join(model_dir, "code", "requirements.txt"))
    return torch.nn.Identity()

def predict_fn(data, model, context):
    name = "X-Amzn-SageMaker-Custom-Attributes"
    attributes = context.get_request_header(0, name) or ""
    context.set_response_header(0, name, attributes.upper())
    if attributes == "version":
        return VERSION
    if attributes.startswith("sleep"):
        time.sleep(float(attributes.removeprefix("sleep")))
    if attributes == "fail":
        raise ValueError("no good")
    return model(data)
"""

# What it answers tells whether it is the model that was asked for.
ONE_OF_MANY = """
def model_fn(model_dir):
    return bytearray(b"x") * {takes}

def input_fn(data, content_type):
    return data

def predict_fn(data, model):
    return "{name}"
"""

TRACE = """
import sys, torch
torch.jit.save(torch.jit.trace(torch.nn.Flatten(0), torch.zeros(1, 2)), sys.argv[1])
"""


def write_wheel(folder, name, version):
    """A package for requirements.txt that pip need not fetch."""
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr(f"{name}.py", f"VERSION = {version!r}\n")
        file.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        file.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{info}/RECORD", "")
    return wheel


# -- one model -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def version():
    """Of a package that an earlier run cannot have left behind."""
    return f"0.{os.getpid()}.{int(time.time())}"


@pytest.fixture(scope="module")
def one(tmp_path_factory, version):
    variables = {
        "SAGEMAKER_TS_BATCH_SIZE": "4",
        "SAGEMAKER_TS_MAX_BATCH_DELAY": "40",
        "SAGEMAKER_TS_MIN_WORKERS": "1",
        "SAGEMAKER_TS_MAX_WORKERS": "1",
        "SAGEMAKER_TS_RESPONSE_TIMEOUT": "7",
    }
    container = Container(tmp_path_factory.mktemp("sagemaker"), **variables)
    code = container.ml / "model" / "code"
    code.mkdir(parents=True)
    (code / "inference.py").write_text(ONE_MODEL)
    wheel = write_wheel(code, "required_by_the_model", version)
    (code / "requirements.txt").write_text(f"/opt/ml/model/code/{wheel.name}\n")
    (container.ml / "model" / "weights.bin").touch()
    container.start()
    try:
        container.wait_ready()
        yield container
    finally:
        container.close()


def invoke(container, body, content_type="application/json", accept="*/*", attributes=""):
    headers = {"Content-Type": content_type, "Accept": accept}
    if attributes:
        headers["X-Amzn-SageMaker-Custom-Attributes"] = attributes
    return container.ask("POST", "/invocations", data=body, headers=headers)


def test_the_toolkit_finds_the_server_as_its_own_child(one):
    (server,) = one.servers()
    assert server.ppid() == one.first.pid
    assert one.ask("GET", "/ping").status_code == 200


def test_the_variables_of_the_toolkit_count(one):
    (model,) = one.ask("GET", "/models/model").json()
    assert (model["batchSize"], model["maxBatchDelay"], model["responseTimeout"]) == (4, 40, 7)
    assert (model["minWorkers"], model["maxWorkers"]) == (1, 1)


def test_requirements_of_the_model_were_installed(one, version):
    assert invoke(one, "[[1]]", attributes="version").json() == version


@pytest.mark.parametrize(
    ("body", "content_type"), [("[[1.0, 2.0]]", "application/json"), ("1.0,2.0", "text/csv")]
)
@pytest.mark.parametrize("accept", ["application/json", "text/csv", "application/x-npy"])
def test_content_types_and_the_accept_header_reach_the_toolkit(one, body, content_type, accept):
    answer = invoke(one, body, content_type, accept)
    assert (answer.status_code, answer.headers["content-type"]) == (200, accept)
    if accept == "application/x-npy":
        assert np.load(io.BytesIO(answer.content)).ravel().tolist() == [1.0, 2.0]
    else:
        assert re.findall(r"[\d.]+", answer.text) == ["1.0", "2.0"]


def test_what_the_toolkit_cannot_read_is_its_own_error(one):
    answer = invoke(one, "x", "application/x-unheard-of")
    assert answer.status_code == 500
    assert "Content type application/x-unheard-of is not supported" in answer.text
    assert "ValueError: no good" in invoke(one, "[[1]]", attributes="fail").text


def test_custom_attributes_go_in_and_out(one):
    answer = invoke(one, "[[1]]", attributes="trace=abc")
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-amzn-sagemaker-custom-attributes"] == "TRACE=ABC"


def test_a_payload_of_25_mebibytes_is_taken_and_no_more(one):
    row = b"[" + b"1," * ((25 * MEBIBYTE - 100) // 2) + b"1]"
    assert len(row) > 24 * MEBIBYTE
    answer = invoke(one, row, accept="application/x-npy", attributes="version")
    assert answer.status_code == 200
    assert invoke(one, row + b" " * MEBIBYTE).status_code == 413


def test_a_stop_finishes_what_was_accepted_before_the_container_is_killed(one, background):
    slow = background(invoke, one, "[[1]]", attributes="sleep2")
    for _ in range(200):
        (model,) = one.ask("GET", "/models/model").json()
        if model["jobQueueStatus"]["pendingRequests"] == 0 and slow.running():
            break
    time.sleep(0.2)
    assert one.stop() == 0
    assert slow.result(5).json() == [[1.0]]
    assert "TorchServe has stopped." in one.text()


# -- without the toolkit ---------------------------------------------------------------------------


def test_an_archive_is_served_without_the_toolkit(tmp_path, make_archive):
    container = Container(tmp_path)
    handler = "def handle(data, context):\n    return data and ['plain'] * len(data)\n"
    archive = make_archive(tmp_path, handler, "digits", archive_format="tgz")
    with tarfile.open(archive) as model:
        model.extractall(container.ml / "model", filter="data")
    try:
        container.start("marserve", "--platform", "sagemaker", "serve")
        container.wait_ready()
        assert invoke(container, "x").text == "plain"
        assert container.ask("GET", "/ping").status_code == 200
        assert container.stop() == 0
    finally:
        container.close()


# -- many models -----------------------------------------------------------------------------------


class Agent:
    """What SageMaker does beside a container of many models.

    A model is loaded when it is asked for first. Where there is no memory for one, those go that
    were not used for longest.
    """

    def __init__(self, container):
        self.container = container
        self.loaded = []
        self.unloads = 0

    def invoke(self, name):
        while name not in self.loaded:
            answer = self.container.load(name)
            if answer.status_code == 200:
                break
            assert answer.status_code == 507, answer.text
            assert self.container.ask("DELETE", f"/models/{self.loaded.pop(0)}").status_code == 200
            self.unloads += 1
        self.loaded = [each for each in self.loaded if each != name] + [name]
        return self.container.invoke(name)


@pytest.fixture(scope="module")
def group():
    with memory_group() as group:
        yield group


@pytest.fixture(scope="module")
def many(tmp_path_factory, group):
    container = Container(tmp_path_factory.mktemp("sagemaker"), SAGEMAKER_MULTI_MODEL="true")
    for number in range(SMALL_MODELS):
        name = f"small-{number:02}"
        container.add_model(name, ONE_OF_MANY.format(name=name, takes=1))
    for number in range(6):
        name, size = f"big-{number}", 60 * MEBIBYTE
        container.add_model(name, ONE_OF_MANY.format(name=name, takes=size), size)
    container.add_model("raises", "def model_fn(model_dir):\n    raise MemoryError('too much')\n")
    container.add_model("endless", ONE_OF_MANY.format(name="endless", takes=1 << 34))
    with group.starting():
        container.start()
    try:
        container.wait_ready()
        yield container
    finally:
        container.close()


def leave_memory_for(many, group, mebibytes):
    """Limit the memory to what is used beside one small model, and a little more."""
    assert many.load("small-00").status_code in (200, 409)
    group.limit(group.used + mebibytes * MEBIBYTE)


def test_models_are_loaded_listed_invoked_and_unloaded(many):
    names = [f"small-{number:02}" for number in range(SMALL_MODELS)]
    for name in names:
        answer = many.load(name)
        assert answer.status_code == 200, answer.text
    assert many.load(names[2]).status_code == 409
    first = many.ask("GET", "/models", params={"limit": 5}).json()
    rest = many.ask("GET", "/models", params={"next_page_token": first["nextPageToken"]}).json()
    assert [each["modelName"] for each in first["models"] + rest["models"]] == names
    assert first["models"][0]["modelUrl"] == f"/opt/ml/models/{names[0]}/model"
    assert not rest.get("nextPageToken")
    for _ in range(2):
        assert [many.invoke(name).json() for name in names] == names
    assert many.ask("GET", f"/models/{names[3]}").json()[0]["modelName"] == names[3]
    assert len(many.servers()) == 1
    # What the toolkit imports is shared: else each worker has 25 MB more of its own.
    small = [each for each in many.processes() if each.memory_full_info().uss < 20 * MEBIBYTE]
    assert len(small) >= SMALL_MODELS
    for name in names:
        assert many.ask("DELETE", f"/models/{name}").status_code == 200
    assert many.ask("DELETE", f"/models/{names[3]}").status_code == 404
    assert many.invoke(names[3]).status_code == 404


def test_a_model_without_a_script_has_the_default_handler_of_the_toolkit(many):
    many.add_model("traced", "")
    folder = many.ml / "models" / "traced" / "model"
    (folder / "code" / "inference.py").unlink()
    trace = [sys.executable, "-W", "ignore", "-c", TRACE, folder / "model.pt"]
    subprocess.run(trace, check=True, timeout=120)
    answer = many.load("traced")
    assert answer.status_code == 200, answer.text
    headers = {"Content-Type": "application/json", "Accept": "application/json"}
    assert many.invoke("traced", "[[1, 2], [3, 4]]", **headers).json() == [1, 2, 3, 4]
    assert many.ask("DELETE", "/models/traced").status_code == 200


def test_a_load_that_memory_runs_out_in_is_told(many):
    answer = many.load("raises")
    assert answer.status_code == 507
    assert "too much" in answer.json()["message"]
    assert many.ask("GET", "/models/raises").status_code == 404


def test_models_that_do_not_fit_together_take_turns_and_none_is_killed(many, group):
    leave_memory_for(many, group, 300)
    agent = Agent(many)
    names = [f"big-{number}" for number in range(6)]
    for _ in range(2):
        assert [agent.invoke(name).json() for name in names] == names
    assert 6 < agent.unloads <= 12
    assert "was killed" not in many.text()


def test_a_model_larger_than_memory_ends_alone(many, group):
    leave_memory_for(many, group, 300)
    pids = {each.pid for each in many.processes()}
    answer = many.load("endless")
    assert answer.status_code == 507
    assert "out of memory" in answer.json()["message"]
    assert many.invoke("small-00").json() == "small-00"
    assert pids <= {each.pid for each in many.processes()}
    assert many.stop() == 0, many.text()
