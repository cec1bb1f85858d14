"""English contractions as a mapping, for handlers that clean text with one.

Ours do it by rules (`handlers.inputs.texts`); the mapping is what these make of each contraction.
"""

from marserve.handlers.inputs.texts import expand_contractions

_PRONOUNS = ("I", "you", "he", "she", "it", "we", "they", "that", "there", "who", "what", "this")
_QUESTIONS = ("how", "when", "where", "why")
_VERBS = (
    *("are", "ca", "could", "did", "do", "does", "had", "has", "have", "is", "might", "must"),
    *("need", "ought", "sha", "should", "was", "were", "wo", "would"),
)
_OTHERS = (
    *("'cause", "ain't", "how'd'y", "let's", "ma'am", "o'clock", "sha'n't", "so's", "so've"),
    *("to've", "y'all", "y'all'd", "y'all're", "y'all've"),
)


def _contractions() -> set[str]:
    endings = {
        **dict.fromkeys(_PRONOUNS, ("'d", "'d've", "'ll", "'ll've", "'ve")),
        **dict.fromkeys(_QUESTIONS, ("'d", "'ll", "'s", "'ve")),
        **dict.fromkeys(_VERBS, ("n't", "n't've")),
        **dict.fromkeys(("could", "might", "must", "should", "would"), ("n't", "n't've", "'ve")),
    }
    made = {word + ending for word, its in endings.items() for ending in its}
    made |= {f"{word}'s" for word in ("he", "she", "it", "that", "there", "who", "what", "here")}
    made |= {f"{word}'re" for word in ("you", "we", "they", "who", "what")}
    return made | {"I'm", *_OTHERS}


CONTRACTION_MAP: dict[str, str] = {
    contraction: expand_contractions(contraction)
    for contraction in sorted(_contractions(), key=lambda text: (-len(text), text))
}
"""Contraction to its words; the longest first, so that a pattern of all prefers them."""
