import pickle
import sys
import types
from collections import Counter, OrderedDict, defaultdict

import pytest
import torch

from marserve.handlers.inputs.vocabulary import index_of, load_vocabulary


class Vocab:
    """Like torchtext's: asked by word, RuntimeError for one that it lacks."""

    def __init__(self, words: dict[str, int]) -> None:
        self.words = words

    def __getitem__(self, word: str) -> int:
        if word not in self.words:
            raise RuntimeError(f"Token {word} not found")
        return self.words[word]


class Stoi:
    """Tells its words only all at once."""

    def get_stoi(self) -> dict[str, int]:
        return {"a": 0, "cat": 1}


WORDS = {"a": 0, "cat": 1}


@pytest.fixture
def saved(tmp_path):
    def save(vocabulary):
        torch.save(vocabulary, tmp_path / "source_vocab.pt")
        return tmp_path / "source_vocab.pt"

    return save


@pytest.mark.parametrize(
    "stored",
    [WORDS, OrderedDict(WORDS), Counter(WORDS), ["a", "cat"], ("a", "cat"), Vocab(WORDS), Stoi()],
    ids=lambda item: type(item).__name__,
)
def test_forms(saved, stored) -> None:
    vocabulary = load_vocabulary(saved(stored))
    assert [vocabulary["a"], vocabulary["cat"]] == [0, 1]
    assert [index_of(vocabulary, word) for word in ("cat", "dog")] == [1, None]


@pytest.mark.parametrize("form", [dict, Vocab])
def test_unknown_words_have_the_index_of_unk(saved, form) -> None:
    vocabulary = load_vocabulary(saved(form({**WORDS, "<unk>": 7})))
    assert [index_of(vocabulary, word) for word in ("cat", "dog")] == [1, 7]


def test_a_vocabulary_with_a_default_does_not_grow(saved) -> None:
    vocabulary = load_vocabulary(saved(defaultdict(int, {"cat": 1})))
    assert index_of(vocabulary, "dog") == 0
    assert "dog" not in vocabulary


@pytest.mark.parametrize("stored", [7, "a cat", object()])
def test_no_vocabulary(saved, stored) -> None:
    with pytest.raises(TypeError, match=f"{type(stored).__name__}, which is no vocabulary"):
        load_vocabulary(saved(stored))


def test_a_package_that_is_missing_is_named(saved, monkeypatch) -> None:
    module = types.ModuleType("torchtext_of_old")
    module.Vocab = type("Vocab", (), {"__module__": module.__name__})
    monkeypatch.setitem(sys.modules, module.__name__, module)
    path = saved(module.Vocab())
    monkeypatch.delitem(sys.modules, module.__name__)

    with pytest.raises(RuntimeError, match="'torchtext_of_old', which is not installed") as caught:
        load_vocabulary(path)
    assert not isinstance(caught.value, pickle.UnpicklingError)
