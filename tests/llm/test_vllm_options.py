"""The fields of the engine's arguments, which are keys of ``vllm_engine_config``, are options."""

import ast
import os
import subprocess

import pytest

pytestmark = pytest.mark.llm

# vLLM itself sets them.
_NO_OPTIONS = {
    "model_weights",
    "_api_process_count",
    "_api_process_rank",
    "enable_mm_processor_stats",
    "mamba_config",
}


def test_each_field_has_an_option(engine_python):
    (package,) = engine_python.parents[1].glob("lib/python*/site-packages/vllm")
    tree = ast.parse((package / "engine" / "arg_utils.py").read_text())
    classes = [each for each in tree.body if isinstance(each, ast.ClassDef)]
    fields = {
        statement.target.id
        for each in classes
        if each.name in ("EngineArgs", "AsyncEngineArgs")
        for statement in each.body
        if isinstance(statement, ast.AnnAssign)
    }
    assert len(fields) > 100
    help_ = subprocess.run(
        [engine_python.with_name("vllm"), "serve", "--help=all"],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env={**os.environ, "COLUMNS": "200"},
    ).stdout
    options = {word.rstrip(",") for word in help_.split() if word.startswith("--")}
    assert {name for name in fields if f"--{name.replace('_', '-')}" not in options} == _NO_OPTIONS
