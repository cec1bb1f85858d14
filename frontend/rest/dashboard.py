"""The dashboard of the management listener, and the time lines of requests.

    /requests                              the slowest requests, the failed ones, or one
    /dashboard  /dashboard/{file}          the page, which is public and contains no data
    /dashboard/events[?model=&version=]    server-sent events: an overview, and a model's details
    /dashboard/predictions/{m}[/{v}]       predict, with the key of management
    /dashboard/log[?file=]                 the last lines of a log file

Data and predictions need the key of management.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from marserve.frontend.aio.background import DaemonThreads
from marserve.frontend.errors import MethodNotAllowed, RouteNotFound
from marserve.frontend.http.request_bodies import query_value, read_input
from marserve.frontend.http.requests import HttpRequest, PlainRequest
from marserve.frontend.http.responses import (
    HttpResponse,
    content_response,
    json_response,
    prediction_response,
)
from marserve.frontend.http.router import Route
from marserve.frontend.logs.files import LogFile
from marserve.frontend.logs.setup import log_files
from marserve.frontend.logs.writers import wait_written
from marserve.frontend.operations.dashboard import Dashboard
from marserve.frontend.operations.requests import RequestLines
from marserve.frontend.rest.inference import Predictor
from marserve.frontend.rest.parameters import query_parameters
from marserve.frontend.serving.registry import ModelRegistry

_FOLDER = Path(__file__).parent.parent / "dashboard"
_PAGE = "index.html"
_DATA = ("events", "predictions", "log")
_LOG_BYTES = 64 * 1024
_LOG_SECONDS = 1.0
_READERS = DaemonThreads("reading of logs", 4)
_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
#: The page runs no other code than its own, and no other page may show it in a frame.
_PAGE_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self' data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


def dashboard_routes(
    dashboard: Dashboard, requests: RequestLines, registry: ModelRegistry, max_request_bytes: int
) -> Mapping[str, Route]:
    """Return the routes of the dashboard."""
    own = _Dashboard(registry, max_request_bytes, dashboard, requests)
    page, data = Route(own.page), Route(own.data, "management")

    def choose(request: HttpRequest | PlainRequest) -> Route:
        return data if request.segments[1:2] and request.segments[1] in _DATA else page

    return {
        "dashboard": Route(own.page, choose=choose),
        "requests": Route(own.list_requests, "management"),
    }


@cache
def _files() -> Mapping[str, HttpResponse]:
    """Return the response for each file of the page, by its path in the folder."""
    return {
        path.relative_to(_FOLDER).as_posix(): HttpResponse(
            200, path.read_bytes(), {"content-type": _TYPES[path.suffix], **_PAGE_HEADERS}
        )
        for path in _FOLDER.rglob("*")
        if path.suffix in _TYPES
    }


@dataclass(frozen=True)
class _Dashboard(Predictor):
    dashboard: Dashboard
    requests: RequestLines

    async def page(self, request: HttpRequest) -> HttpResponse:
        if request.method not in ("GET", "HEAD"):
            raise MethodNotAllowed
        file = _files().get("/".join(request.segments[1:]) or _PAGE)
        if file is None:
            raise RouteNotFound
        return file

    async def data(self, request: HttpRequest) -> HttpResponse:
        match request.method, request.segments[1:]:
            case "GET", ["events"]:
                return await self._events(request)
            case "GET", ["log"]:
                return await self._log(query_value(request, "file"))
            case "POST" | "PUT", ["predictions", name, *version] if len(version) < 2:
                return await self._predict(request, name, version[0] if version else None)
            case _, ["events" | "log"] | ["predictions", _] | ["predictions", _, _]:
                raise MethodNotAllowed
        raise RouteNotFound

    async def _events(self, request: HttpRequest) -> HttpResponse:
        name, version = query_value(request, "model"), query_value(request, "version")
        model = self.registry.find(name, version or None) if name else None
        return prediction_response(await self.dashboard.watch(model))

    async def _log(self, name: str) -> HttpResponse:
        files = {file.path.name: file for file in log_files()}
        name = name or next(iter(files), "")
        try:
            lines = await _READERS.run(_last_lines, files[name]) if name else []
        except (KeyError, OSError) as error:  # another program may have moved it
            raise RouteNotFound(f"Log file not found: {name}") from error
        return json_response({"files": list(files), "file": name, "lines": lines})

    async def _predict(self, request: HttpRequest, name: str, version: str | None) -> HttpResponse:
        extra = {"url_path": "", "explain": "False"}
        input_ = await read_input(request, self.max_request_bytes, extra)
        # The key of management is not for the handler.
        input_.headers = {
            key: text for key, text in input_.headers.items() if key.lower() != "authorization"
        }
        return await self.predict(request, name, version, input_=input_)

    async def list_requests(self, request: HttpRequest) -> HttpResponse:
        if len(request.segments) > 1:
            raise RouteNotFound
        if request.method != "GET":
            raise MethodNotAllowed
        return content_response(self.requests.list(query_parameters(request)))


def _last_lines(file: LogFile) -> list[str]:
    """Return the last lines, those of requests before this one among them; raises OSError."""
    wait_written(_LOG_SECONDS, target=file)
    return file.tail(_LOG_BYTES)
