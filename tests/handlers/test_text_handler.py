import pickle
import sys
import types
from collections import Counter, OrderedDict, defaultdict

import pytest
import torch

from marserve.backend.errors import PredictionException
from marserve.handlers.text_handler import TextHandler, index_of, load_vocabulary

MODEL_FILE = """
import torch

class Nothing(torch.nn.Module):
    pass
"""


@pytest.fixture
def make(tmp_path, make_context):
    """A handler that is initialised, and keywords for the manifest."""
    name = f"model_{tmp_path.name}.py"
    (tmp_path / name).write_text(MODEL_FILE)

    def run(**manifest):
        handler = TextHandler()
        handler.initialize(make_context(modelFile=name, **manifest))
        return handler

    return run


def test_the_vocabulary_of_the_archive(tmp_path, make):
    torch.save({"cat": 5}, tmp_path / "source_vocab.pt")
    handler = make()
    assert handler.initialized
    assert handler.source_vocab["cat"] == 5


@pytest.mark.parametrize("absolute", [True, False])
def test_the_vocabulary_of_the_manifest(tmp_path, make, absolute):
    torch.save({"cat": 6}, tmp_path / "words.pt")
    path = str(tmp_path / "words.pt") if absolute else "words.pt"
    assert make(sourceVocab=path).source_vocab["cat"] == 6


def test_no_vocabulary(make):
    with pytest.raises(FileNotFoundError, match=r"Missing the source_vocab file.*source_vocab\.pt"):
        make()


def test_the_steps_by_the_names_that_subclasses_use():
    handler = TextHandler()
    assert handler._remove_html_tags("<b>Hi</b>") == "Hi"
    assert handler._expand_contractions("don't") == "do not"
    assert handler._remove_accented_characters("é") == "e"
    assert handler._remove_punctuation("a.b") == handler._remove_puncutation("a.b") == "ab"
    assert handler._tokenize("A cat.") == ["a", "cat", "."]
    assert handler.get_word_token(["Ġa", "cat"]) == ["a", "cat"]


def test_a_replaced_step_is_used():
    class Shouting(TextHandler):
        def _remove_punctuation(self, text):
            return text.upper()

        def _tokenize(self, text):
            return text.split()

    assert Shouting()._tokens_of("<i>Don't</i> stop!") == ["DO", "NOT", "STOP!"]


def test_a_subclass_may_call_a_step_by_the_name_of_the_class():
    class Trimmed(TextHandler):
        def _remove_html_tags(self, text):
            return TextHandler._remove_html_tags(self, text).strip()

    assert Trimmed()._tokens_of("<i> Hi </i>") == ["hi"]
    assert TextHandler._expand_contractions(Trimmed(), "don't") == "do not"
    assert TextHandler._remove_accented_characters(Trimmed(), "é") == "e"
    assert TextHandler._remove_punctuation(Trimmed(), "a.b") == "ab"


def test_attributions_are_summed_per_token_and_scaled_to_length_one():
    handler = TextHandler()
    for shape in ((2, 2), (1, 2, 2)):
        attributions = torch.tensor([1.0, 2.0, 2.0, 2.0]).reshape(shape)
        assert handler.summarize_attributions(attributions).tolist() == pytest.approx([0.6, 0.8])
    assert handler.summarize_attributions(torch.zeros(2, 2)).tolist() == [0.0, 0.0]


def test_captums_attributions_need_captum(monkeypatch):
    monkeypatch.setitem(sys.modules, "captum.attr", None)
    with pytest.raises(PredictionException, match=r"captum.* : 501"):
        _ = TextHandler().lig


def test_captums_attributions_to_the_layer_named_embedding():
    pytest.importorskip("captum")

    class Mood(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding.from_pretrained(torch.tensor([[0.0], [1], [3]]))

        def forward(self, text):
            return self.embedding(text).sum(dim=1)

    handler = TextHandler()
    handler.model = Mood()
    attributions = handler.lig.attribute(
        torch.tensor([[1, 2]]), baselines=torch.tensor([[0, 0]]), target=0
    )
    assert attributions.flatten().tolist() == pytest.approx([1, 3])
    assert handler.summarize_attributions(attributions).tolist() == pytest.approx(
        [1 / 10**0.5, 3 / 10**0.5]
    )


class Vocab:
    """Like torchtext's: asked by word, RuntimeError for one that it lacks."""

    def __init__(self, words: dict[str, int]) -> None:
        self.words = words

    def __getitem__(self, word: str) -> int:
        if word not in self.words:
            raise RuntimeError(f"Token {word} not found")
        return self.words[word]


class Stoi:
    """Has only `get_stoi`."""

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
def test_forms(saved, stored):
    vocabulary = load_vocabulary(saved(stored))
    assert [vocabulary["a"], vocabulary["cat"]] == [0, 1]
    assert [index_of(vocabulary, word) for word in ("cat", "dog")] == [1, None]


@pytest.mark.parametrize("form", [dict, Vocab])
def test_unknown_words_have_the_index_of_unk(saved, form):
    vocabulary = load_vocabulary(saved(form({**WORDS, "<unk>": 7})))
    assert [index_of(vocabulary, word) for word in ("cat", "dog")] == [1, 7]


def test_a_vocabulary_with_a_default_does_not_grow(saved):
    vocabulary = load_vocabulary(saved(defaultdict(int, {"cat": 1})))
    assert index_of(vocabulary, "dog") == 0
    assert "dog" not in vocabulary


@pytest.mark.parametrize("stored", [7, "a cat", object()])
def test_other_objects_are_not_vocabularies(saved, stored):
    with pytest.raises(TypeError, match=f"{type(stored).__name__}, not a vocabulary"):
        load_vocabulary(saved(stored))


def test_a_package_that_is_missing_is_named(saved, monkeypatch):
    module = types.ModuleType("torchtext_of_old")
    module.Vocab = type("Vocab", (), {"__module__": module.__name__})
    monkeypatch.setitem(sys.modules, module.__name__, module)
    path = saved(module.Vocab())
    monkeypatch.delitem(sys.modules, module.__name__)

    with pytest.raises(RuntimeError, match="'torchtext_of_old', which is not installed") as caught:
        load_vocabulary(path)
    assert not isinstance(caught.value, pickle.UnpicklingError)
