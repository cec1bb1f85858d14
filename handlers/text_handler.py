"""Handlers of English text: cleaning, vocabulary, sums of attributions."""

import functools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from marserve.backend.context import Context
from marserve.handlers.base_handler import BaseHandler
from marserve.handlers.explanations import captum_attribution
from marserve.handlers.inputs import texts
from marserve.handlers.model_files import load_pickled
from marserve.handlers.refusals import UnusableInput
from marserve.handlers.utils import value_of

_UNKNOWN = "<unk>"  # the entry for unknown words
_VOCABULARY_FILE = "source_vocab.pt"
_SAMPLE = (
    "The committee didn't expect the new bridge to open before winter, but the engineers finished "
    "their work in October, and the first trains crossed the river on a bright Sunday morning."
)
_OTHER_SAMPLE = "The soup was cold and the waiter was rude; we shall not come back."


class TextHandler(BaseHandler):
    """A handler whose requests are str or UTF-8 bytes, under ``data`` or ``body``."""

    def __init__(self) -> None:
        super().__init__()
        self.source_vocab: Any = None  # from a word to its index: source_vocab[word]
        self.tokenizer: Any = texts.tokenize  # from a text to its words

    def initialize(self, context: Context) -> None:
        """Load the model and its vocabulary."""
        super().initialize(context)
        self.source_vocab = load_vocabulary(self.get_source_vocab_path(context))

    def sample_input(self) -> Any:
        """Return two sentences."""
        return _SAMPLE, _OTHER_SAMPLE

    def get_source_vocab_path(self, context: Context) -> str:
        """Return the path of the manifest's ``sourceVocab``, or of source_vocab.pt."""
        manifest = (context.manifest or {}).get("model") or {}
        model_dir = str(context.system_properties["model_dir"])
        path = Path(model_dir, manifest.get("sourceVocab") or _VOCABULARY_FILE)
        if not path.is_file():
            raise FileNotFoundError(
                f"Missing the source_vocab file: {path}. A text handler needs the vocabulary that "
                f"its model was trained with, saved by torch.save as {_VOCABULARY_FILE}"
            )
        return str(path)

    @functools.cached_property
    def lig(self) -> Any:
        """Captum's integrated gradients of the model's layer ``embedding``, for subclasses."""
        return captum_attribution().LayerIntegratedGradients(self.model, self.model.embedding)

    def get_word_token(self, input_tokens: Sequence[str]) -> list[str]:
        """Return the tokens without the character that marks a blank in byte-pair tokenizers."""
        return [
            token.replace("\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}", "") for token in input_tokens
        ]

    def summarize_attributions(self, attributions: Any) -> Any:
        """Sum the attributions per token, the first but last dimension, and scale to length 1."""
        per_token = attributions.reshape(-1, attributions.shape[-1]).sum(dim=-1)
        length = torch.linalg.vector_norm(per_token)
        return per_token / length if length > 0 else per_token

    def _text_of(self, row: Any) -> str:
        value = value_of(row)
        if isinstance(value, str):
            return value
        if not isinstance(value, bytes | bytearray | memoryview):
            raise UnusableInput("The input is not a text.")
        try:
            return bytes(value).decode()
        except UnicodeDecodeError as error:
            raise UnusableInput(f"The input is not text in UTF-8: {error}") from error

    def _tokens_of(self, text: str) -> list[str]:
        text = self._remove_html_tags(text).lower()
        text = self._remove_accented_characters(self._expand_contractions(text))
        return self._tokenize(self._remove_punctuation(text))

    # Subclasses call and override these.

    def _expand_contractions(self, text: str) -> str:
        return texts.expand_contractions(text)

    def _remove_accented_characters(self, text: str) -> str:
        return texts.remove_accents(text)

    def _remove_html_tags(self, text: str) -> str:
        return texts.remove_html_tags(text)

    def _remove_punctuation(self, text: str) -> str:
        return texts.remove_punctuation(text)

    def _remove_puncutation(self, text: str) -> str:  # as older TorchServe spelt it
        return self._remove_punctuation(text)

    def _tokenize(self, text: str) -> list[str]:
        return list(self.tokenizer(text))


def load_vocabulary(path: str | Path) -> Any:
    """Load a vocabulary that ``torch.save`` wrote; ``result[word]`` is the index of a word."""
    loaded = load_pickled(str(path), "cpu")
    if isinstance(loaded, Mapping):
        words = dict(loaded)  # a copy: a defaultdict would grow with every text
        if isinstance(loaded, defaultdict) and loaded.default_factory is not None:
            words.setdefault(_UNKNOWN, loaded.default_factory())
        return words
    if isinstance(loaded, list | tuple):
        return {word: index for index, word in enumerate(loaded)}
    if hasattr(loaded, "__getitem__") and not isinstance(loaded, str | bytes):
        return loaded
    if hasattr(loaded, "get_stoi"):
        return dict(loaded.get_stoi())
    raise TypeError(f"{path} contains a {type(loaded).__name__}, not a vocabulary")


def index_of(vocabulary: Any, word: str) -> int | None:
    """Return the index of a word, or that of unknown words, or None."""
    for known in (word, _UNKNOWN):
        try:
            return int(vocabulary[known])
        except (KeyError, RuntimeError):
            continue
    return None
