"""Cleaning and tokenizing of English text, without torch.

Copies of TorchServe's text classifier import `get_tokenizer`, `ngrams_iterator` and
`CONTRACTION_MAP`.
"""

import re
import string
import unicodedata
from collections.abc import Callable, Iterator, Sequence

from marserve.handlers.utils import CLEANUP_REGEX

Tokenizer = Callable[[str], list[str]]

_IRREGULAR = {
    "'cause": "because",
    "ain't": "is not",
    "can't": "cannot",
    "here's": "here is",
    "how'd": "how did",
    "how'd'y": "how do you",
    "let's": "let us",
    "ma'am": "madam",
    "o'clock": "of the clock",
    "sha'n't": "shall not",
    "shan't": "shall not",
    "so's": "so as",
    "where'd": "where did",
    "won't": "will not",
    "y'all": "you all",
}
# After other words 's is more often a genitive.
_VERBAL = re.compile(
    r"\b(he|she|it|that|this|what|who|where|when|why|how|there)'s\b", re.IGNORECASE
)
_ENDINGS = {
    "n't": " not",
    "'re": " are",
    "'ve": " have",
    "'ll": " will",
    "'d": " would",
    "'m": " am",
}


def _any_of(words: Sequence[str]) -> str:
    return "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True))


_IRREGULAR_PATTERN = re.compile(rf"(?<!\w)(?:{_any_of([*_IRREGULAR])})(?!\w)", re.IGNORECASE)
_ENDING_PATTERN = re.compile(rf"(?<=\w)(?:{_any_of([*_ENDINGS])})(?!\w)", re.IGNORECASE)
_TOKEN_PATTERN = re.compile(r"[.,()!?']|[^\s.,()!?';:]+")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def expand_contractions(text: str) -> str:
    """Expand contractions: ``don't`` becomes ``do not``. A capital initial stays."""
    text = _VERBAL.sub(r"\1 is", _IRREGULAR_PATTERN.sub(_written_out, text))
    return _ENDING_PATTERN.sub(lambda found: _ENDINGS[found[0].lower()], text)


def _written_out(found: re.Match[str]) -> str:
    expanded = _IRREGULAR[found[0].lower()]
    return expanded[0].upper() + expanded[1:] if found[0][0].isupper() else expanded


def _contractions() -> set[str]:
    words_and_endings = [
        ("I you he she it we they that there who what this", "'d 'd've 'll 'll've 've"),
        ("how when where why", "'d 'll 's 've"),
        ("are ca could did do does had has have is might must", "n't n't've"),
        ("need ought sha should was were wo would", "n't n't've"),
        ("could might must should would", "'ve"),
        ("he she it that there who what here", "'s"),
        ("you we they who what", "'re"),
        ("I'm 'cause ain't how'd'y let's ma'am o'clock sha'n't so's so've to've", " "),
        ("y'all y'all'd y'all're y'all've", " "),
    ]
    return {
        word + ending
        for words, endings in words_and_endings
        for word in words.split()
        for ending in endings.split() or [""]
    }


CONTRACTION_MAP: dict[str, str] = {
    contraction: expand_contractions(contraction)
    for contraction in sorted(_contractions(), key=lambda text: (-len(text), text))
}
"""Contractions and their words, the longest first, so that a pattern of all matches these first."""


def remove_html_tags(text: str) -> str:
    """Remove HTML tags and entities."""
    return CLEANUP_REGEX.sub("", text)


def remove_accents(text: str) -> str:
    """Reduce letters to ASCII; remove characters without such a form."""
    return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()


def remove_punctuation(text: str) -> str:
    """Remove ASCII punctuation, without inserting blanks."""
    return text.translate(_NO_PUNCTUATION)


def tokenize(text: str) -> list[str]:
    """Return the words in lower case, as torchtext's tokenizer for basic English does."""
    return _TOKEN_PATTERN.findall(text.lower().replace("<br />", " ").replace('"', ""))


def get_tokenizer(tokenizer: str | Tokenizer | None, language: str = "en") -> Tokenizer:
    """Return a function from a text to its words; ValueError for an unknown tokenizer."""
    if tokenizer is None:
        return str.split
    if callable(tokenizer):
        return tokenizer
    if (tokenizer, language) != ("basic_english", "en"):
        raise ValueError(f"Tokenizer {tokenizer!r} for language {language!r} is not supported.")
    return tokenize


def ngrams_iterator(token_list: Sequence[str], ngrams: int) -> Iterator[str]:
    """Yield the tokens, then each two consecutive ones joined by a blank, and so on."""
    for length in range(1, ngrams + 1):
        for start in range(len(token_list) - length + 1):
            yield " ".join(token_list[start : start + length])
