"""The help texts of the commands."""

import contextlib
import io
import os
from collections.abc import Callable
from unittest import mock

from marserve.frontend import cli
from marserve.tools import llm_launcher
from marserve.tools.archiver import archiver, workflow_archiver

Program = Callable[[list[str]], object]

_WIDTH = "84"  # columns that fit on the page


def commands() -> str:
    """Return the help of all commands."""
    own: dict[str, Program] = {
        "torchserve": lambda words: cli.main(words, "torchserve"),
        **{f"marserve {name}": _program(name) for name in cli.PROGRAMS},
        "marserve doctor --compare": lambda words: cli.main(["doctor", "--compare", *words]),
        "torch-model-archiver": archiver.main,
        "torch-workflow-archiver": workflow_archiver.main,
        "python -m ts.llm_launcher": llm_launcher.main,
    }
    return "\n".join(f"## {name}\n\n```text\n{_help(name, of)}```\n" for name, of in own.items())


def _program(name: str) -> Program:
    return lambda words: cli.main([name, *words])


def _help(name: str, program: Program) -> str:
    text = io.StringIO()
    environment = mock.patch.dict(os.environ, {"COLUMNS": _WIDTH})
    with environment, contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        program(["--help"])
    if not text.getvalue().startswith("usage: "):
        raise ValueError(f"{name} has no help")
    return text.getvalue()
