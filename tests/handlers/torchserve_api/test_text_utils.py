import pytest
from ts.handler_utils.text_utils import get_tokenizer, ngrams_iterator


def test_words_and_their_neighbours() -> None:
    words = get_tokenizer("basic_english")("Here we are!")
    assert words == ["here", "we", "are", "!"]
    assert list(ngrams_iterator(words[:3], 2)) == ["here", "we", "are", "here we", "we are"]
    assert get_tokenizer(None)("Here  we are!") == ["Here", "we", "are!"]
    assert get_tokenizer(list)("Hi") == ["H", "i"]


@pytest.mark.parametrize(("name", "language"), [("basic_english", "de"), ("spacy", "en")])
def test_a_tokenizer_that_is_not_there_is_reported(name: str, language: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}' for '{language}'"):
        get_tokenizer(name, language)
