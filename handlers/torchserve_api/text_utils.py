"""TorchServe's ``ts.handler_utils.text_utils``: torchtext's two functions that text handlers use.

Handlers that began as a copy of TorchServe's text classifier import them.
"""

from collections.abc import Callable, Iterator, Sequence

from marserve.handlers.inputs import texts

Tokenizer = Callable[[str], list[str]]


def get_tokenizer(tokenizer: str | Tokenizer | None, language: str = "en") -> Tokenizer:
    """Return a function from a text to its words.

    Args:
        tokenizer: ``basic_english`` for `texts.tokenize`, None to split at blanks, or a function,
            which is returned.
        language: Of ``basic_english``, ``en``.

    Raises:
        ValueError: There is no such tokenizer, or none for the language.
    """
    if tokenizer is None:
        return str.split
    if callable(tokenizer):
        return tokenizer
    if (tokenizer, language) != ("basic_english", "en"):
        raise ValueError(f"There is no tokenizer {tokenizer!r} for {language!r} here.")
    return texts.tokenize


def ngrams_iterator(token_list: Sequence[str], ngrams: int) -> Iterator[str]:
    """Give the tokens, then every two neighbours, and so on, joined by blanks."""
    return texts.ngrams(token_list, ngrams)
