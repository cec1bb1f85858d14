"""JSON documents in TorchServe's layout, which clients compare."""

import json
from typing import Any


def json_text(document: Any) -> str:
    """Return a JSON document as text: indented by two, without null members."""
    return json.dumps(_without_nulls(document), indent=2, ensure_ascii=False) + "\n"


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
