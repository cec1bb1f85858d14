import re

import pytest
from ts.handler_utils.text_utils import get_tokenizer, ngrams_iterator
from ts.torch_handler.contractions import CONTRACTION_MAP

from marserve.handlers.inputs import texts


@pytest.mark.parametrize(
    ("text", "expanded"),
    [
        ("i don't know", "i do not know"),
        ("we can't and won't", "we cannot and will not"),
        ("they'd've gone", "they would have gone"),
        ("can't've", "cannot have"),
        ("it's here's that's", "it is here is that is"),
        ("the cat's basket", "the cat's basket"),
        (
            "I'm sure you're right, we've won, she'll see",
            "I am sure you are right, we have won, she will see",
        ),
        ("Don't! Can't! Let's!", "Do not! Cannot! Let us!"),
        ("how'd y'all do, ma'am", "how did you all do, madam"),
        ("nothing to expand", "nothing to expand"),
        ("", ""),
    ],
)
def test_contractions(text, expanded):
    assert texts.expand_contractions(text) == expanded


def test_html():
    assert texts.remove_html_tags("<p>fish &amp; <b>chips</b></p>") == "fish  chips"


def test_accents():
    assert texts.remove_accents("Crème brûlée ☃") == "Creme brulee "


def test_punctuation():
    assert texts.remove_punctuation("well-known: 'so', (he) said!") == "wellknown so he said"


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("A cat, a dog.", ["a", "cat", ",", "a", "dog", "."]),
        ('it\'s (so) "good"!?', ["it", "'", "s", "(", "so", ")", "good", "!", "?"]),
        ("one;two:three<br />four", ["one", "two", "three", "four"]),
        ("  \n ", []),
    ],
)
def test_tokens(text, tokens):
    assert texts.tokenize(text) == tokens


@pytest.mark.parametrize(
    ("longest", "expected"),
    [
        (1, ["a", "b", "c"]),
        (2, ["a", "b", "c", "a b", "b c"]),
        (4, ["a", "b", "c", "a b", "b c", "a b c"]),
    ],
)
def test_ngrams(longest, expected):
    assert list(texts.ngrams_iterator(["a", "b", "c"], longest)) == expected


def test_the_mapping_as_handlers_use_it():
    pattern = re.compile(f"({'|'.join(CONTRACTION_MAP)})", re.IGNORECASE)

    def expand(match):
        return CONTRACTION_MAP.get(match[0]) or CONTRACTION_MAP[match[0].lower()]

    text = "I'd say they couldn't've seen what's there, y'all"
    assert pattern.sub(expand, text) == (
        "I would say they could not have seen what is there, you all"
    )


def test_words_and_their_neighbours():
    words = get_tokenizer("basic_english")("Here we are!")
    assert words == ["here", "we", "are", "!"]
    assert list(ngrams_iterator(words[:3], 2)) == ["here", "we", "are", "here we", "we are"]
    assert get_tokenizer(None)("Here  we are!") == ["Here", "we", "are!"]
    assert get_tokenizer(list)("Hi") == ["H", "i"]


@pytest.mark.parametrize(("name", "language"), [("basic_english", "de"), ("spacy", "en")])
def test_a_missing_tokenizer_is_an_error(name, language):
    with pytest.raises(ValueError, match=f"'{name}' for language '{language}'"):
        get_tokenizer(name, language)
