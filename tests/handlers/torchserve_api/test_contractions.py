import re

from ts.torch_handler.contractions import CONTRACTION_MAP


def test_the_mapping_as_handlers_use_it() -> None:
    pattern = re.compile(f"({'|'.join(CONTRACTION_MAP)})", re.IGNORECASE)

    def expand(match):
        return CONTRACTION_MAP.get(match[0]) or CONTRACTION_MAP[match[0].lower()]

    text = "I'd say they couldn't've seen what's there, y'all"
    assert pattern.sub(expand, text) == (
        "I would say they could not have seen what is there, you all"
    )
