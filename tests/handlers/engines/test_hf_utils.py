import sys
import types

import pytest

from marserve.handlers.engines.hf_utils import download_model


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


def test_weights_and_tokenizer_are_asked_for(asked) -> None:
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


def test_what_is_asked_for_by_default(asked) -> None:
    download_model()
    [options] = asked
    assert options["repo_id"] == "meta-llama/Meta-Llama-3.1-8B-Instruct"
    assert (options["revision"], options["cache_dir"], options["token"]) == ("main", ".cache", True)


def test_without_the_hubs_library(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match="download_model needs the package huggingface_hub"):
        download_model()
