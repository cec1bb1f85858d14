import logging

import pytest

from marserve.frontend.errors import BadRequest
from marserve.frontend.operations.parameters import Parameters


@pytest.mark.parametrize(
    ("value", "number"),
    [
        ("7", 7),
        (7, 7),
        (7.0, 7),
        (" +7 ", 7),
        ("\x1e7", 7),
        ("0", 0),
        (None, None),
        ("-1", None),
        (-1, None),
    ],
)
def test_numbers(value, number):
    assert Parameters({"response_timeout": value}).at_least("response_timeout", 0) == number


@pytest.mark.parametrize("value", ["soon", "nan", "inf", "", "0x10", "7 s"])
def test_a_text_that_is_no_number_counts_as_not_given_with_a_warning(value, caplog):
    with caplog.at_level(logging.WARNING):
        assert Parameters({"response_timeout": value}).at_least("response_timeout", 1) is None
    assert f"Parameter response_timeout={value!r} is not a number" in caplog.text


@pytest.mark.parametrize(
    ("value", "number"),
    [("7", 7), (" 7 ", 7), ("-7", -7), (2**31, 100), ("9" * 30, 100), ("0x7", 100), ("1_0", 100),
     ("\u0667", 100), (None, 100), ([7], 100), (True, 100)],
)  # fmt: skip
def test_an_optional_number_is_written_in_digits(value, number):
    assert Parameters({"limit": value}).integer("limit", 100) == number


@pytest.mark.parametrize(
    "value",
    [0, "0", -2, "-5", "1.5", 1.5, "1e3", ".5", 2**31, "9" * 99, "9" * 5000, True, False, [1], {}],
)
def test_a_number_that_makes_no_sense_is_refused_by_name(value):
    with pytest.raises(BadRequest, match=r"^response_timeout=.{,100}: it is a whole number, "):
        Parameters({"response_timeout": value}).at_least("response_timeout", 1)
