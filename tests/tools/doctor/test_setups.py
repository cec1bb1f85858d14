"""The doctor on ten setups: as people have them in images and clusters, and three broken ones."""

import json
from pathlib import Path
from typing import Any

import pytest

from marserve.tools.doctor.main import main

SETUPS = Path(__file__).with_name("setups")
#: By setup: the exit status, and all findings but those that something stays as it is.
EXPECTED: dict[str, tuple[int, set[str]]] = {
    "docker": (
        0,
        {
            "image Dockerfile:11",
            "package Dockerfile:9",
            "no-java Dockerfile:5",
            "console-log Dockerfile:19",
            "outlives-server dockerd-entrypoint.sh:9",
            "config-no-effect config.properties:6",
        },
    ),
    "kserve": (
        0,
        {
            "kserve-runtime inference-service.yaml:9",
            "kserve-port inference-service.yaml:13",
            "kserve-wrapper inference-service.yaml:16",
            "image inference-service.yaml:28",
            "console-log inference-service.yaml:33",
            "config-no-effect config.properties:8",
        },
    ),
    "aks": (
        0,
        {
            "image chart/values.yaml:1",
            "tokens config.properties:1",
            "config-no-effect config.properties:7",
            "batching config.properties:10",
            "probes chart/templates/deployment.yaml",
            "console-log chart/templates/deployment.yaml:15",
        },
    ),
    "eks": (0, {"image deployment.yaml:10", "console-log deployment.yaml:11"}),
    "benchmark": (
        0,
        {
            "config-no-effect config.properties:4",
            "config-no-effect config.properties:7",
            "log4j log4j2.xml:9",
            "batching model-config.yaml",
        },
    ),
    "sagemaker": (
        0,
        {
            "image Dockerfile:1",
            "package code/requirements.txt:2",
            "config-lines sagemaker-ts.properties:7",
            "config-no-effect sagemaker-ts.properties:1",
        },
    ),
    "vertex": (0, {"image Dockerfile:1", "console-log Dockerfile:3"}),
    "broken-config": (
        1,
        {
            "config-value config.properties:1",
            "config-value config.properties:3",
            "config-value config.properties:4",
            "config-lines config.properties:5",
            "config-ignored config.properties:6",
            "config-ignored config.properties:7",
            "config-ignored config.properties:8",
            "batching config.properties:9",
            "config-ignored config.properties:9",
            "config-variable config.properties:10",
            "config-ignored config.properties:11",
            "metrics-file metrics.yaml",
        },
    ),
    "broken-archives": (
        1,
        {
            "runtime store/counter",
            "workflow store/cycle/spec.yaml",
            "archive-file store/detector",
            "ts-in-requirements store/detector/requirements.txt:1",
            "requirements-off store/detector/requirements.txt",
            "handler-requirement store/detector/handler.py:3",
            "handler-import store/detector/handler.py:4",
            "handler-import store/detector/handler.py:5",
            "handler-import store/detector/handler.py:6",
            "handler-class store/detector/handler.py",
            "model-yaml store/detector/model-config.yaml",
        },
    ),
    "broken-containers": (
        1,
        {
            "command-flag compose.yaml:4",
            "console-log compose.yaml:4",
            "two-servers .",
            "image compose.yaml:3",
            "package requirements.txt:1",
            "probe compose.yaml:3",
            "environment-ignored config.properties",
            "outlives-server start.sh:4",
            "tokens config.properties:1",
        },
    ),
}


@pytest.mark.parametrize("setup", EXPECTED)
def test_a_setup(setup, capsys):
    status, expected = EXPECTED[setup]
    assert main([str(SETUPS / setup), "--json"]) == status
    document = json.loads(capsys.readouterr().out)
    assert document["status"] == status
    found = {place_of(each) for each in document["findings"] if each["level"] != "works"}
    assert found == expected


COROUTINES = {
    "function": "async def handle(data, context):\n    return data\n",
    "class": "class Own:\n    async def handle(self, data, context):\n        return data\n",
}


@pytest.mark.parametrize("source", COROUTINES.values(), ids=COROUTINES)
def test_a_coroutine_needs_asynchronous_communication(source, tmp_path, make_archive, capsys):
    make_archive(tmp_path, source, "without", "batchSize: 1\n")
    make_archive(tmp_path, source, "bare")
    make_archive(tmp_path, source, "with", "asyncCommunication: true\n")
    make_archive(tmp_path, "vllm_handler", "engine", "vllm_engine_config: {}\n")
    assert main([str(tmp_path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["findings"]
    refused = {each["file"] for each in found if each["rule"] == "handler-coroutine"}
    assert refused == {"without.mar", "bare.mar", "engine.mar"}


def test_a_section_that_the_handler_does_not_read_is_told(tmp_path, make_archive, capsys):
    source = "def handle(data, context):\n    return data\n"
    make_archive(tmp_path, source, "own", "batchSize: 1\noptimization: {precision: bf16}\n")
    assert main([str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["findings"]
    (told,) = (each for each in found if each["rule"] == "model-yaml-ignored")
    assert (told["line"], told["what"].startswith("optimization is applied by Base")) == (2, True)


def test_our_own_deployments_have_nothing_to_mend(capsys):
    deploy = Path(__file__).parents[3] / "deploy"
    # Some are for people who come from an image or a package of others.
    assert main([str(deploy), "--json", "--ignore", "image", "--ignore", "package"]) == 0
    found = json.loads(capsys.readouterr().out)["findings"]
    assert {place_of(each) for each in found if each["level"] != "works"} == set()


def test_every_setup_is_looked_at():
    assert {path.name for path in SETUPS.iterdir()} == EXPECTED.keys()


def place_of(finding: dict[str, Any]) -> str:
    line = f":{finding['line']}" if finding["line"] else ""
    return f"{finding['rule']} {finding['file']}{line}"
