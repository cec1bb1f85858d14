"""The handler around a stand-in for TensorRT-LLM; the real library was never run with these."""

import asyncio
import json
import sys
import types
from types import SimpleNamespace

import pytest

from marserve.backend.errors import PredictionException
from marserve.handlers.trt_llm_handler import TRTLLMHandler


class Tokenizer:
    eos_token_id, pad_token_id = 2, None


class Result:
    """Awaited, returns the whole text; iterated, yields the text so far."""

    def __init__(self, texts) -> None:
        self.texts = texts

    def __await__(self):
        yield from asyncio.sleep(0).__await__()
        return SimpleNamespace(outputs=[SimpleNamespace(text=self.texts[-1])])

    async def __aiter__(self):
        for text in self.texts:
            yield SimpleNamespace(outputs=[SimpleNamespace(text=text)])


class LLM:
    texts = ("Hel", "Hello \N{REPLACEMENT CHARACTER}", "Hello \N{SNOWMAN}", "Hello \N{SNOWMAN}!")

    def __init__(self, **options) -> None:
        self.options = options
        self.asked: list[tuple] = []

    def generate_async(self, prompt, *, sampling_params, streaming):
        self.asked.append((prompt, sampling_params, streaming))
        return Result(self.texts)


@pytest.fixture(params=["llmapi", "hlapi"])
def library(request, monkeypatch):
    loaded = []

    def from_pretrained(directory, **options):
        loaded.append(directory)
        return Tokenizer()

    modules = {
        "tensorrt_llm": {},
        f"tensorrt_llm.{request.param}": {
            "LLM": LLM,
            "KvCacheConfig": lambda **options: ("cache", options),
            "SamplingParams": lambda **options: options,
        },
        "transformers": {"AutoTokenizer": SimpleNamespace(from_pretrained=from_pretrained)},
    }
    for name, members in modules.items():
        module = types.ModuleType(name)
        module.__path__ = []
        module.__dict__.update(members)
        monkeypatch.setitem(sys.modules, name, module)
    return loaded


def make(make_context, **handler) -> TRTLLMHandler:
    made = TRTLLMHandler()
    made.initialize(make_context(yaml={"handler": handler}))
    return made


@pytest.fixture
def ask(library, make_context, begin_batch):
    handler = make(make_context, engine_dir="engine", tokenizer_dir="llama")

    def ask(*rows):
        context, sent = begin_batch(make_context(), *([{}] * len(rows))), []
        context.on_intermediate = lambda *what: sent.append(what)
        return asyncio.run(handler.handle(list(rows), context)), sent, handler

    return ask


def test_engine_and_tokenizer(library, make_context):
    handler = make(
        make_context,
        engine_dir="engine",
        tokenizer_dir="llama",
        kv_cache_config={"free_gpu_memory_fraction": 0.1},
        llm_config={"max_batch_size": 4},
    )
    assert library == ["llama"]
    assert handler.tokenizer.pad_token_id == 2
    assert handler.trt_llm_engine.options == {
        "model": "engine",
        "tokenizer": handler.tokenizer,
        "kv_cache_config": ("cache", {"free_gpu_memory_fraction": 0.1}),
        "max_batch_size": 4,
    }


def test_an_answer_at_once(ask):
    row = {"body": {"prompt": "Hi", "max_tokens": 9}}
    answers, sent, handler = ask(row)
    assert answers == ["Hello \N{SNOWMAN}!"]
    assert sent == []
    [(prompt, parameters, streaming)] = handler.trt_llm_engine.asked
    assert (prompt, streaming) == ("Hi", False)
    assert parameters == {"end_id": 2, "pad_id": 2, "max_tokens": 9}
    assert row["body"] == {"prompt": "Hi", "max_tokens": 9}


def test_the_pieces_of_a_stream_are_the_text(ask):
    answers, sent, handler = ask({"data": b'{"prompt": "Hi", "streaming": true}'})
    assert answers == [""]
    assert [json.loads(results[0]) for results, *_ in sent] == [
        {"text": "Hel"},
        {"text": "lo \N{SNOWMAN}"},
        {"text": "!"},
    ]
    assert sent[0][1:] == ({0: "id-0"}, "Result", 200)
    assert handler.trt_llm_engine.asked[0][2] is True


@pytest.mark.parametrize("body", [b"Hi", b"[]", {"text": "Hi"}, b"", b"[" * 100_000, b"9" * 5000])
def test_a_request_without_a_prompt(ask, body):
    with pytest.raises(PredictionException, match=r" : 400"):
        ask({"body": body})


def test_a_configuration_without_an_engine(make_context):
    with pytest.raises(ValueError, match=r"handler\.engine_dir"):
        make(make_context, tokenizer_dir="llama")


def test_without_the_library(monkeypatch, make_context):
    monkeypatch.setitem(sys.modules, "tensorrt_llm", None)
    with pytest.raises(ImportError, match="trt_llm_handler needs the package tensorrt_llm"):
        make(make_context, engine_dir="engine")
