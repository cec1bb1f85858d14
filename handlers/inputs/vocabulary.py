"""A text model's vocabulary: from a word to its index."""

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from marserve.handlers.model_files import load_pickled

UNKNOWN = "<unk>"
"""The word whose index stands for every word that a vocabulary lacks."""


def load_vocabulary(path: str | Path) -> Any:
    """Load a vocabulary that ``torch.save`` wrote.

    It is a mapping from word to index, the list of words in the order of their indices, or an
    object like torchtext's Vocab, with ``__getitem__`` or ``get_stoi``.

    Returns:
        Something to ask for ``[word]``.

    Raises:
        RuntimeError: It holds objects of a package that is not installed.
        TypeError: It is none of these.
    """
    loaded = load_pickled(str(path), "cpu")
    if isinstance(loaded, Mapping):
        return _plain(loaded)
    if isinstance(loaded, list | tuple):
        return {word: index for index, word in enumerate(loaded)}
    if hasattr(loaded, "__getitem__") and not isinstance(loaded, str | bytes):
        return loaded
    if hasattr(loaded, "get_stoi"):
        return dict(loaded.get_stoi())
    raise TypeError(f"{path} holds a {type(loaded).__name__}, which is no vocabulary")


def _plain(words: Mapping[str, int]) -> dict[str, int]:
    """Copy a mapping: one that makes up what it lacks would grow with every text."""
    plain = dict(words)
    if isinstance(words, defaultdict) and words.default_factory is not None:
        plain.setdefault(UNKNOWN, words.default_factory())
    return plain


def index_of(vocabulary: Any, word: str) -> int | None:
    """Return a word's index, else the index for unknown words, else None."""
    for known in (word, UNKNOWN):
        try:
            return int(vocabulary[known])
        except (KeyError, RuntimeError):
            continue
    return None
