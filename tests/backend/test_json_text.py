import json
import math
from typing import Any

import pytest

from marserve.backend.json_text import KEEP, NULL, REFUSE, NotJson, to_json

NAN, INF = math.nan, math.inf


class Odd:
    """Written by ``default``."""


def _as_list(value: Any) -> Any:
    if isinstance(value, Odd):
        return [NAN, 1]
    raise TypeError("unknown")


@pytest.mark.parametrize(
    ("value", "wanted", "place"),
    [
        (NAN, None, "prediction is NaN"),
        ([1, -INF], [1, None], "prediction[1] is -Infinity"),
        ({"a": {"b": (INF,)}}, {"a": {"b": [None]}}, 'prediction["a"]["b"][0] is Infinity'),
        ({NAN: 1, 2: "x"}, {"NaN": 1, "2": "x"}, "prediction has the key NaN"),
        ([Odd()], [[None, 1]], "prediction[0][0] is NaN"),
    ],
)
def test_numbers_that_are_not_finite(value, wanted, place):
    assert json.loads(to_json(value, NULL, default=_as_list)) == wanted
    with pytest.raises(NotJson) as raised:
        to_json(value, REFUSE, default=_as_list)
    assert str(raised.value).startswith(f"{place}, and JSON has no NaN")
    assert to_json(value, KEEP, default=_as_list) == json.dumps(value, default=_as_list)


@pytest.mark.parametrize("json_nan", [KEEP, NULL, REFUSE])
def test_other_values_are_written_as_by_json(json_nan):
    value = {"a": [1, 2.5, None, True, "NaN"], "b": {}}
    assert to_json(value, json_nan, indent=2) == json.dumps(value, indent=2)
    with pytest.raises(TypeError):
        to_json([object()], json_nan)
    endless = []
    endless.append(endless)
    with pytest.raises(ValueError, match="Circular"):
        to_json(endless, json_nan)
