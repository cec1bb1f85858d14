"""A language model from the launcher to the client, with a stand-in for the engine alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

STAND_INS = Path(__file__).with_name("stand_ins")


@pytest.fixture(scope="module")
def server(prepare_server):
    path = os.pathsep.join([str(STAND_INS), os.environ.get("PYTHONPATH", "")])
    with prepare_server({"PYTHONPATH": path}) as server:
        words = ["--model_name", "llm", "--model_store", str(server.store), "--model_id", "org/llm"]
        words += ["--vllm_engine.max_num_seqs", "8", "--disable_token_auth"]
        with server.console.open("ab") as console:
            server.process = subprocess.Popen(
                [sys.executable, "-m", "ts.llm_launcher", *words],
                cwd=server.directory,
                env=server.environment,
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        server.wait_ready()
        server.wait_workers("llm", "READY")
        yield server
        server.stop()
        assert list(server.store.iterdir()) == []  # the launcher's directory is gone


def ask(server, route, method="POST", **kwargs):
    return server.inference(method, f"/predictions/llm/1.0/v1/{route}", **kwargs)


def test_a_completion(server):
    answer = ask(server, "completions", json={"model": "org/llm", "prompt": "meow"})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == {"choices": [{"text": "MEOW"}], "seqs": 8}


def test_a_streamed_completion(server):
    body = {"model": "org/llm", "prompt": "one two three", "stream": True}
    answer = ask(server, "completions", json=body, stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = b"".join(answer.iter_content(None)).split(b"\n\n")
    assert events == [b"data: one", b"data: two", b"data: three", b"data: [DONE]", b""]


def test_many_completions_at_once(server, together):
    calls = [
        lambda n=n: ask(server, "completions", json={"model": "org/llm", "prompt": f"p{n}"})
        for n in range(16)
    ]
    texts = [answer.json()["choices"][0]["text"] for answer in together(calls)]
    assert texts == [f"P{n}" for n in range(16)]


def test_the_models(server):
    assert ask(server, "models", "GET").json() == {"data": [{"id": "org/llm"}]}


def test_what_the_engine_refuses(server):
    answer = ask(server, "completions", json={"model": "other", "prompt": "meow"})
    assert (answer.status_code, answer.json()["error"]["message"]) == (404, "no such model")


def test_a_route_that_is_none(server):
    answer = ask(server, "load_lora_adapter", json={})
    assert answer.status_code == 404
    assert answer.json()["message"] == "Unknown API endpoint: v1/load_lora_adapter"
