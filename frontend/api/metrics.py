"""The metrics listener: Prometheus text."""

from collections.abc import Mapping
from urllib.parse import parse_qs

from marserve.frontend.api.door import Route, Visit
from marserve.frontend.api.outputs import Answer, text_answer
from marserve.frontend.telemetry.exposition import CONTENT_TYPE, render
from marserve.frontend.telemetry.metrics import Metrics


def metrics_routes(metrics: Metrics) -> Mapping[str, Route]:
    """The routes of the metrics listener; it never asks for a token."""

    async def show(visit: Visit) -> Answer:
        query = parse_qs(visit.request.raw_path.partition("?")[2])
        return text_answer(render(metrics.registry, query.get("name[]", ())), CONTENT_TYPE)

    return {"metrics": Route(show)}
