import sys
import threading
import types
from queue import SimpleQueue

import pytest
import torch

from marserve.handlers.engines.hugging_face import TextIteratorStreamerBatch, download_model

WORDS = ["<pad>", "a ", "kitten ", "sleeps ", "purrs "]


class OneStreamer:
    """Like transformers' TextIteratorStreamer, for a tokenizer with a word per token."""

    def __init__(self, tokenizer, skip_prompt=False, timeout=None, **decode_kwargs) -> None:
        self.tokenizer, self.timeout, self.decode_kwargs = tokenizer, timeout, decode_kwargs
        self.is_skipping = skip_prompt
        self.pieces: SimpleQueue[str | None] = SimpleQueue()

    def put(self, tokens) -> None:
        tokens = tokens[0] if tokens.dim() > 1 else tokens
        if self.is_skipping:
            self.is_skipping = False
        else:
            self.pieces.put(self.tokenizer.decode(tokens, **self.decode_kwargs))

    def end(self) -> None:
        self.pieces.put(None)

    def __iter__(self):
        return self

    def __next__(self):
        piece = self.pieces.get(timeout=self.timeout)
        if piece is None:
            raise StopIteration
        return piece


class Tokenizer:
    def decode(self, tokens, skip_special_tokens=False):
        return "".join(WORDS[int(item)] for item in tokens if item or not skip_special_tokens)


@pytest.fixture(autouse=True)
def transformers(monkeypatch):
    module = types.ModuleType("transformers")
    module.TextIteratorStreamer = OneStreamer
    monkeypatch.setitem(sys.modules, "transformers", module)
    return module


def generate(streamer) -> None:
    streamer.put(torch.tensor([[1, 2], [0, 2]]))
    streamer.put(torch.tensor([3, 4]))
    streamer.put(torch.tensor([1, 2]))
    streamer.end()


def texts(streamer):
    thread = threading.Thread(target=generate, args=(streamer,))
    thread.start()
    pieces = [[item["text"] for item in piece] for piece in streamer]
    thread.join()
    return pieces


def test_a_piece_for_each_element_at_a_time():
    streamer = TextIteratorStreamerBatch(Tokenizer(), 2, timeout=9, skip_special_tokens=True)
    assert texts(streamer) == [
        ["a kitten ", "kitten "],
        ["sleeps ", "purrs "],
        ["a ", "kitten "],
    ]


def test_without_the_prompt():
    streamer = TextIteratorStreamerBatch(Tokenizer(), 2, skip_prompt=True, timeout=9)
    assert texts(streamer) == [["sleeps ", "purrs "], ["a ", "kitten "]]


def test_a_batch_of_another_size():
    streamer = TextIteratorStreamerBatch(Tokenizer(), 3)
    with pytest.raises(ValueError, match=r"batch of 3, not for tokens of shape \(2, 2\)"):
        generate(streamer)


def test_without_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match="needs the package transformers"):
        TextIteratorStreamerBatch(Tokenizer(), 1)


@pytest.fixture
def asked(monkeypatch):
    calls = []

    def snapshot_download(**options):
        calls.append(options)
        return "/cache/models--org--llm/snapshots/abc"

    hub = types.ModuleType("huggingface_hub")
    hub.snapshot_download = snapshot_download
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    return calls


def test_weights_and_tokenizer_are_asked_for(asked):
    directory = download_model("org/llm", "v2", "cache", use_auth_token="secret")
    assert directory == "/cache/models--org--llm/snapshots/abc"
    [options] = asked
    assert "*.safetensors" in options.pop("allow_patterns")
    assert options == {
        "repo_id": "org/llm",
        "revision": "v2",
        "cache_dir": "cache",
        "token": "secret",
    }


def test_what_is_asked_for_by_default(asked):
    download_model()
    [options] = asked
    assert options["repo_id"] == "meta-llama/Meta-Llama-3.1-8B-Instruct"
    assert (options["revision"], options["cache_dir"], options["token"]) == ("main", ".cache", True)


def test_without_the_hubs_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match="download_model needs the package huggingface_hub"):
        download_model()
