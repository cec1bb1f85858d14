import pytest

from marserve.frontend.configuration.setting_kinds import ABOVE_0


@pytest.mark.parametrize(
    ("text", "number"), [("5", 5), ("0.25", 0.25), (".5", 0.5), ("+1e3", 1000), ("2E-3", 0.002)]
)
def test_a_number_above_0(text, number):
    assert ABOVE_0.from_text(text) == number


@pytest.mark.parametrize(
    "text",
    ["0", "-1", "", ".", "inf", "nan", "1e999", "9" * 5000, "1_0", "\u0663", "5" + " " * 40 + "x"],
)
def test_texts_that_are_no_number_above_0(text):
    with pytest.raises(ValueError, match="a number above 0"):
        ABOVE_0.from_text(text)
