"""The metrics listener: Prometheus text."""

from collections.abc import Mapping
from urllib.parse import parse_qs

from marserve.frontend.http.requests import HttpRequest
from marserve.frontend.http.responses import HttpResponse, text_response
from marserve.frontend.http.router import Route
from marserve.frontend.telemetry.exposition import CONTENT_TYPE, render
from marserve.frontend.telemetry.metrics import REQUEST_COUNTERS, Metrics


def metrics_routes(metrics: Metrics, *, legacy: bool = False) -> Mapping[str, Route]:
    """Return the route of the metrics listener; ``legacy`` omits the metrics of the log."""

    def is_on_page(name: str) -> bool:
        return not legacy or name in REQUEST_COUNTERS or name.startswith("marserve_")

    async def show(request: HttpRequest) -> HttpResponse:
        query = parse_qs(request.target.partition("?")[2])
        page = render(metrics.registry, query.get("name[]", ()), is_on_page)
        return text_response(page, CONTENT_TYPE)

    return {"metrics": Route(show)}
