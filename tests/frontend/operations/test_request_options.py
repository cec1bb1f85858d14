"""What clients may say about time and rank, on every path that leads to a prediction."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marserve.frontend.batching.jobs import Priority
from marserve.frontend.errors import BadRequest
from marserve.frontend.operations.request_options import read_request_options
from marserve.frontend.serving.predict_request import NO_OPTIONS, RequestOptions

Ask = Callable[..., Any]

PATHS = [
    "/predictions/m",
    "/predictions/m/2/deeper",
    "/explanations/m",
    "/invocations?model_name=m",
    "/models/m/invoke",
    "/m/predict",
    "/m/2/predict",
    "/v1/models/m:predict",
    "/v1/models/m:explain",
    "/v2/models/m/infer",
    "/v2/models/m/explain",
]


@pytest.mark.parametrize("path", PATHS)
def test_every_path_to_a_prediction_reads_them(path, ask):
    asked = ask(path, "POST", b"", "x-timeout-ms: 250", "X-Priority: HIGH").document
    assert asked["options"] == [0.25, "HIGH"]
    assert asked["headers"]["X-Priority"] == "HIGH"  # the handler sees it all the same


@pytest.mark.parametrize("path", PATHS)
def test_a_wrong_value_is_refused_before_the_model_gets_the_request(path, ask):
    answer = ask(path, "POST", b"", "X-Timeout-Ms: soon")
    assert answer.status == 400
    assert answer.document == {
        "code": 400,
        "type": "BadRequestException",
        "message": "X-Timeout-Ms='soon': it is a number of milliseconds above 0.",
    }


def test_a_request_without_the_headers_has_no_options():
    assert read_request_options({"X-Mine": "1"}) is NO_OPTIONS


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"x-timeout-ms": "1"}, RequestOptions(0.001)),
        ({"x-timeout-ms": "0.5"}, RequestOptions(0.0005)),
        ({"x-timeout-ms": "9" * 400}, RequestOptions(math.inf)),
        ({"x-priority": "low"}, RequestOptions(priority=Priority.LOW)),
        ({"x-priority": "Normal"}, NO_OPTIONS),
        ({"x-priority": "HIGH", "x-timeout-ms": "20"}, RequestOptions(0.02, Priority.HIGH)),
    ],
)
def test_the_values_of_the_headers(headers, expected):
    assert read_request_options(headers) == expected


@pytest.mark.parametrize(
    "number", ["0", "0.0", "-1", "+1", "", "1e3", "inf", "nan", "1_0", "\u0661", "1,5"]
)
def test_a_timeout_is_a_plain_number_above_0(number):
    with pytest.raises(
        BadRequest, match=r"X-Timeout-Ms=.*: it is a number of milliseconds above 0"
    ):
        read_request_options({"x-timeout-ms": number})


@pytest.mark.parametrize("word", ["", "urgent", "0", "high,low"])
def test_a_priority_is_one_of_three_words(word):
    with pytest.raises(BadRequest, match=f"X-Priority='{word}': it is one of high, normal, low"):
        read_request_options({"x-priority": word})


@given(st.text())
def test_any_text_is_understood_or_refused_with_a_short_message(text):
    try:
        assert read_request_options({"x-timeout-ms": text}).timeout > 0
    except BadRequest as error:
        assert len(error.message) < 150  # noqa: PT017 - either is right
