"""The routes that describe a listener's API; on every listener, never behind a token."""

from collections.abc import Mapping

from aiohttp import web

from marserve.frontend.errors import MethodNotAllowed, RouteNotFound
from marserve.frontend.http.responses import Answer, json_answer, text_answer
from marserve.frontend.http.router import HttpRequest, Route
from marserve.frontend.rest.front_page import front_page
from marserve.frontend.rest.openapi import describe_listener
from marserve.frontend.version import __version__


def description_routes(listener: str, *, open_inference: bool) -> Mapping[str, Route]:
    """``/`` and ``/api-description`` of a listener.

    Args:
        listener: Its name, which says what it serves: "Inference and Management".
        open_inference: Whether the whole Open Inference Protocol is on.
    """
    serves = listener.split(" and ")
    page = front_page(serves)

    async def root(visit: HttpRequest) -> Answer:
        if visit.segments:  # a path that begins with two slashes
            raise RouteNotFound
        if visit.request.method == "OPTIONS":
            return await description(visit)
        if _is_browser(visit.request):
            return text_answer(page, "text/html; charset=utf-8")
        raise MethodNotAllowed

    async def description(visit: HttpRequest) -> Answer:
        if len(visit.segments) > 1:
            raise RouteNotFound
        return json_answer(describe_listener(serves, __version__, open_inference=open_inference))

    return {"": Route(root), "api-description": Route(description)}


def _is_browser(request: web.BaseRequest) -> bool:
    """Whether somebody wants to look at a page; programs accept anything, or say nothing."""
    accepted = request.headers.get("Accept", "").lower()
    return request.method in ("GET", "HEAD") and "text/html" in accepted
