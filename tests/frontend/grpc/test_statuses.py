"""Every error has a code and TorchServe's text."""

import pytest
from grpc import StatusCode

from marserve.frontend.errors import (
    BadRequest,
    ModelNotFound,
    PredictionFailed,
    RequestExpired,
    VersionConflict,
)
from marserve.frontend.grpc.statuses import code_of, http_status_of, status_of


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (BadRequest("b"), "INVALID_ARGUMENT", "b\norg.pytorch.serve.http.BadRequestException"),
        (
            ModelNotFound("m"),
            "NOT_FOUND",
            "m\norg.pytorch.serve.archive.model.ModelNotFoundException",
        ),
        (VersionConflict("v"), "ABORTED", "v\norg.pytorch.serve.http.ConflictStatusException"),
        (
            PredictionFailed("p", status=507),
            "INTERNAL",
            "p\norg.pytorch.serve.http.InternalServerException",
        ),
        (
            RequestExpired("r"),
            "DEADLINE_EXCEEDED",
            "r\norg.pytorch.serve.http.RequestTimeoutException",
        ),
    ],
)
def test_an_error_has_a_code_and_a_text(error, code, text):
    assert (status_of(error).code.name, status_of(error).text) == (code, text)


def test_every_http_status_has_a_code_and_every_code_a_status():
    assert {code_of(status) for status in range(100, 600)} >= {
        StatusCode.OK,
        StatusCode.INTERNAL,
        StatusCode.UNKNOWN,
        StatusCode.FAILED_PRECONDITION,
        StatusCode.UNAVAILABLE,
        StatusCode.OUT_OF_RANGE,
        StatusCode.RESOURCE_EXHAUSTED,
    }
    for code in StatusCode:
        assert (http_status_of(code) == 200) == (code is StatusCode.OK)
        assert 200 <= http_status_of(code) < 600
