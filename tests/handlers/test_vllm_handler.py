"""The command line of vLLM's server for a section ``handler`` of model-config.yaml."""

import asyncio
import sys

import pytest

from marserve.handlers.vllm_handler import VLLMHandler, vllm_command


@pytest.fixture(autouse=True)
def program(tmp_path, monkeypatch):
    path = tmp_path / "bin" / "vllm"
    path.parent.mkdir()
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(path.parent))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    return path


def options(**settings):
    command = vllm_command("org/llm", ["llm"], settings)
    return command[command.index("org/llm", 3) + 1 :]


def test_the_program_the_model_the_socket_and_the_names(program):
    assert vllm_command("org/llm", ["a", "b", "a"], {}) == [
        *[str(program), "serve", "org/llm", "--uds", "{socket}"],
        *["--served-model-name", "a", "b", "org/llm"],
    ]


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("max_num_seqs", 64, ["--max-num-seqs=64"]),
        ("gpu_memory_utilization", 0.5, ["--gpu-memory-utilization=0.5"]),
        ("dtype", "bfloat16", ["--dtype=bfloat16"]),
        ("seed", -1, ["--seed=-1"]),
        ("enforce_eager", True, ["--enforce-eager"]),
        ("enable_prefix_caching", False, ["--no-enable-prefix-caching"]),
        ("disable_log_stats", False, []),
        ("max_model_len", None, []),
        ("middleware", ["a", "b"], ["--middleware", "a", "b"]),
        ("limit_mm_per_prompt", {"image": 2}, ['--limit-mm-per-prompt={"image": 2}']),
        ("a_list", [{"b": 1}], ["--a-list", '{"b": 1}']),
        ("model", "other", []),
        ("served_model_name", "name", []),
    ],
)
def test_a_key_of_the_engine_becomes_an_option(key, value, words):
    assert options(vllm_engine_config={key: value}) == words


def test_adapters_and_a_template():
    adapters = {"french": "adapters/fr", "german": "adapters/de"}
    assert options(adapters=adapters, chat_template="t.jinja") == [
        *["--enable-lora", "--lora-modules", "french=adapters/fr", "german=adapters/de"],
        "--chat-template=t.jinja",
    ]
    chosen = options(adapters={"a": "b"}, vllm_engine_config={"enable_lora": False})
    assert chosen == ["--no-enable-lora", "--lora-modules", "a=b"]


def test_without_vllm(program):
    program.unlink()
    with pytest.raises(ImportError, match=r"needs the program vllm, .*pip install vllm"):
        vllm_command("m", [], {})


@pytest.mark.parametrize("is_there", [True, False])
def test_a_model_path_is_a_directory_of_the_archive_or_an_id(
    make_context, tmp_path, is_there, program, monkeypatch
):
    if is_there:
        (tmp_path / "org" / "llm").mkdir(parents=True)
    expected = str(tmp_path / "org" / "llm") if is_there else "org/llm"
    text = tmp_path / "command.json"
    program.write_text(f'#!/bin/sh\nfor word; do echo "$word"; done > {text}\nexit 2\n')
    handler = VLLMHandler()
    loop = asyncio.new_event_loop()
    monkeypatch.setattr(asyncio, "get_event_loop", lambda: loop)
    with pytest.raises(ValueError, match="vllm has ended with status 2"):
        handler.initialize(make_context(yaml={"handler": {"model_path": "org/llm"}}))
    loop.close()
    assert text.read_text().split("\n")[1] == expected
