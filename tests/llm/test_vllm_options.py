"""The keys of ``vllm_engine_config`` as options of the engine's command line."""

import ast
import os
import re
import subprocess

import pytest

from marserve.handlers.vllm_handler import vllm_command

pytestmark = pytest.mark.llm

# vLLM itself sets them.
_NO_OPTIONS = {
    "model_weights",
    "_api_process_count",
    "_api_process_rank",
    "enable_mm_processor_stats",
    "mamba_config",
}


@pytest.fixture(scope="module")
def help_text(engine_python):
    return subprocess.run(
        [engine_python.with_name("vllm"), "serve", "--help=all"],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env={**os.environ, "COLUMNS": "200"},
    ).stdout


@pytest.fixture(scope="module")
def options(help_text):
    lines = re.findall(r"^  (-.*?)(?:  |$)", help_text, re.MULTILINE)
    return {word.rstrip(",") for line in lines for word in line.split() if word.startswith("--")}


def test_each_field_has_an_option(engine_python, options):
    (package,) = engine_python.parents[1].glob("lib/python*/site-packages/vllm")
    tree = ast.parse((package / "engine" / "arg_utils.py").read_text())
    fields = {
        statement.target.id
        for each in tree.body
        if isinstance(each, ast.ClassDef) and each.name in ("EngineArgs", "AsyncEngineArgs")
        for statement in each.body
        if isinstance(statement, ast.AnnAssign)
    }
    assert len(fields) > 100
    assert {name for name in fields if f"--{name.replace('_', '-')}" not in options} == _NO_OPTIONS


@pytest.mark.parametrize("value", [True, False])
def test_each_flag_can_be_set_and_unset(engine_python, help_text, options, monkeypatch, value):
    monkeypatch.setenv("PATH", str(engine_python.parent), os.pathsep)
    flags = re.findall(r"^  --([a-z0-9-]+)(?:, --no-\S+)?(?:  |$)", help_text, re.MULTILINE)
    assert len(flags) > 50
    config = {flag.replace("-", "_"): value for flag in flags}
    words = vllm_command("m", [], {"vllm_engine_config": config})
    assert {word for word in words if word.startswith("--")} <= options
