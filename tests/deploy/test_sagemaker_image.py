"""SageMaker's images: what SageMaker reads of them, and that the toolkit is the one we test."""

import json
import re
from pathlib import Path

from sagemaker_container import TOOLKIT

from marserve.frontend.cli import build_parser

TEXT = (Path(__file__).parents[2] / "deploy" / "sagemaker" / "Dockerfile").read_text()


def stage(name: str) -> str:
    """The instructions of a stage."""
    (text,) = re.findall(rf"^FROM \S+ AS {name}\n(.*?)(?=^FROM|\Z)", TEXT, re.MULTILINE | re.DOTALL)
    return text


def test_the_last_stage_has_the_toolkit_that_is_tested():
    assert TEXT.rindex("\nFROM ") == TEXT.index("\nFROM base AS toolkit")
    assert f'ARG TOOLKIT="{TOOLKIT}"' in stage("build-toolkit")
    assert "COPY --from=build-toolkit " in stage("toolkit")
    # Without an ENTRYPOINT SageMaker's command is the toolkit's script of that name.
    assert "ENTRYPOINT" not in stage("base") + stage("toolkit")


def test_the_command_of_the_image_without_it_is_one_of_ours():
    found = re.findall(r"^(?:ENTRYPOINT|CMD) (.*)", stage("archives"), re.MULTILINE)
    program, *arguments = [word for words in found for word in json.loads(words)]
    assert program == "marserve"
    options = build_parser().parse_args(arguments)
    assert (options.platform, options.command) == ("sagemaker", "serve")


def test_sagemaker_finds_its_labels():
    for label in ("multi-models", "accept-bind-to-port"):
        assert f'com.amazonaws.sagemaker.capabilities.{label}="true"' in stage("base")
