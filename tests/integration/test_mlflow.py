"""MLflow's own plugin for TorchServe deploys to this server; TorchServe itself is not there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from environments import environment
from servers import Server

pytestmark = [pytest.mark.integration, pytest.mark.environments]

#: --no-deps: the plugin asks for torchserve.
INSTALLS = (
    ("mlflow-skinny>=3,<4", "pandas", "docker", "requests"),
    ("--no-deps", "mlflow-torchserve==0.1.0"),
)

MODEL = """
import torch


class Linear(torch.nn.Linear):
    def __init__(self):
        super().__init__(2, 1, bias=False)
"""
HANDLER = """
import json
from pathlib import Path

import torch
from linear import Linear


class Handler:
    def initialize(self, context):
        manifest = context.manifest["model"]
        self.model = Linear()
        weights = Path(context.system_properties["model_dir"]) / manifest["serializedFile"]
        self.model.load_state_dict(torch.load(weights))

    def handle(self, data, context):
        explain = context.get_request_header(0, "explain") == "True"
        return [self.explain(row) if explain else self.predict(row) for row in data]

    def read(self, row):
        body = row.get("body")
        if body is None:  # fields of a form
            return [float(row["a"]), float(row["b"])]
        return json.loads(body)["data"]

    def predict(self, row):
        with torch.inference_mode():
            return self.model(torch.tensor([self.read(row)]))[0].tolist()

    def explain(self, row):
        weights = self.model.weight[0].tolist()
        return [weight * value for weight, value in zip(weights, self.read(row))]
"""
# The folder of MLflow has the weights under the name that the plugin looks for.
WRITER = """
import sys
from pathlib import Path
import torch
state = {"weight": torch.tensor([[2.0, 3.0]])}
for place in sys.argv[1:]:
    Path(place).parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, place)
"""


@pytest.fixture(scope="module")
def said(start_server, tmp_path_factory):
    """What the plugin has to say, call by call."""
    python = environment("mlflow", *INSTALLS, borrows=True)
    work = tmp_path_factory.mktemp("mlflow")
    (work / "linear.py").write_text(MODEL)
    (work / "handler.py").write_text(HANDLER)
    weights, folder = work / "linear.pth", work / "model"
    places = [str(weights), str(folder / "data" / "state_dict.pth")]
    subprocess.run([sys.executable, "-c", WRITER, *places], check=True, timeout=120)
    (folder / "MLmodel").write_text("flavors: {pytorch: {}}\n")
    with start_server(preload_modules="torch") as server:
        variables = properties_for_the_plugin(server, work)
        arguments = [weights, folder, work / "linear.py", work / "handler.py"]
        script = Path(__file__).with_name("clients") / "mlflow_client.py"
        done = subprocess.run(
            [python, script, *arguments],
            cwd=work,
            env=variables,
            capture_output=True,
            text=True,
            timeout=150,
        )
        assert done.returncode == 0, done.stderr + server.console_text()
        yield json.loads(done.stdout.splitlines()[-1])


def properties_for_the_plugin(server: Server, work: Path) -> dict[str, str]:
    """Its environment: where the server is, where archives go, torch and the archiver."""
    file = work / "addresses.properties"
    listeners = ("inference", "management")
    lines = [f"{name}_address=http://localhost:{server.ports[name]}\n" for name in listeners]
    file.write_text("".join(lines))
    programs = Path(sys.executable).parent
    return {
        **os.environ,
        "CONFIG_PROPERTIES": str(file),
        "EXPORT_PATH": str(server.store),
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "MLFLOW_TRACKING_URI": f"sqlite:///{work}/tracking.db",
    }


def test_models_are_created(said):
    assert said["create"] == {"name": "linear/1.0", "flavor": None}
    assert said["create again"] == {"name": "linear/2.0", "flavor": None}
    assert said["create other"] == {"name": "other/1.0", "flavor": None}
    assert said["list"] == ["linear", "other"]
    assert [each["modelVersion"] for each in said["get all"]] == ["1.0", "2.0"]
    (other,) = said["get other"]
    assert (other["batchSize"], len(other["workers"])) == (4, 2)


def test_models_answer(said):
    assert json.loads(said["predict frame"]) == [8.0]
    assert json.loads(said["predict tensor"]) == [8.0]
    assert json.loads(said["predict json"]) == [8.0]
    assert said["explain"] is None or json.loads(said["explain"]) == [2.0, 6.0]


def test_models_are_changed(said):
    assert said["default"] == "2.0"
    assert said["scaled"][0]["minWorkers"] == 1


def test_models_are_removed(said):
    assert said["left"] == ["linear"]
    assert "404" in said["get gone"]
    assert "404" in said["delete gone"]
    assert "404" in said["predict gone"]
