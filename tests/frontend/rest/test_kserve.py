"""KServe's first protocol."""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.parametrize(("verb", "explain"), [("predict", "False"), ("explain", "True")])
def test_the_default_version_is_asked_and_told_whether_to_explain(
    verb: str, explain: str, ask: Callable[..., Any]
) -> None:
    asked = ask(f"/v1/models/m:{verb}?q=1", "POST", b'{"instances": []}').document
    assert (asked["model"], asked["version"], asked["by_version"]) == ("m", "1", False)
    assert asked["parts"] == [["body", '{"instances": []}']]
    assert asked["headers"] == {"explain": explain}


@pytest.mark.parametrize(
    ("path", "word"),
    [
        ("/v1/models/x:predict", "ModelNotFoundException"),
        ("/v1/models/m:x:predict", "ModelNotFoundException"),
        ("/v1/models/m", "ResourceNotFoundException"),
        ("/v1/models/m:train", "ResourceNotFoundException"),
        ("/v1/models/:predict", "ResourceNotFoundException"),
        ("/v1/models/m:predict/1", "ResourceNotFoundException"),
        ("/v1/m:predict", "ResourceNotFoundException"),
        ("/v1/models", "ResourceNotFoundException"),
        ("/v1", "ResourceNotFoundException"),
    ],
)
def test_other_paths_are_not_found(path: str, word: str, ask: Callable[..., Any]) -> None:
    answer = ask(path)
    assert (answer.status, answer.document["type"]) == (404, word)
