"""The routes that describe a listener's API; on every listener, never behind a token."""

from collections.abc import Callable, Mapping
from typing import Any

from marserve.frontend.api.door import Route, Visit
from marserve.frontend.api.openapi import (
    describe_inference,
    describe_management,
    describe_metrics,
    describe_shared,
)
from marserve.frontend.api.outputs import Answer, json_answer
from marserve.frontend.errors import MethodNotAllowed
from marserve.frontend.version import __version__

_DESCRIBE: dict[str, Callable[[str], dict[str, Any]]] = {
    "Inference": describe_inference,
    "Management": describe_management,
    "Metrics": describe_metrics,
}


def description_routes(listener: str) -> Mapping[str, Route]:
    """``OPTIONS /`` and ``/api-description`` of a listener; its name says what it serves."""
    describe = _DESCRIBE.get(listener, describe_shared)

    async def root(visit: Visit) -> Answer:
        if visit.request.method != "OPTIONS":
            raise MethodNotAllowed
        return json_answer(describe(__version__))

    async def description(_visit: Visit) -> Answer:
        return json_answer(describe(__version__))

    return {"": Route(root), "api-description": Route(description)}
