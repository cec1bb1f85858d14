"""The levels of the loggers, read and changed while the server runs; part of management.

``inherit`` takes a logger back to the level of the logger above.
"""

import logging
from collections.abc import Mapping
from urllib.parse import parse_qs

from marserve.frontend.errors import BadRequest, MethodNotAllowed, RouteNotFound
from marserve.frontend.http.requests import HttpRequest
from marserve.frontend.http.responses import HttpResponse, json_response
from marserve.frontend.http.router import Route
from marserve.frontend.logs.levels import LEVELS, level_word, logger_levels

logger = logging.getLogger(__name__)

_INHERIT = "inherit"


def logger_routes() -> Mapping[str, Route]:
    """Return the route, which needs the key of management."""
    return {"loggers": Route(_loggers, "management")}


async def _loggers(request: HttpRequest) -> HttpResponse:
    match request.segments[1:], request.method:
        case [[], "GET"]:
            return json_response({"loggers": [_describe(name) for name in logger_levels()]})
        case [[name], "GET"]:
            return json_response(_describe(name))
        case [[name], "PUT"]:
            query = parse_qs(request.target.partition("?")[2])
            return _change(name, query.get("level", [""])[-1].lower())
        case [[] | [_], _]:
            raise MethodNotAllowed
    raise RouteNotFound


def _describe(name: str) -> dict[str, str]:
    levels = logger_levels()
    if name not in levels:
        raise RouteNotFound(f"Logger not found: {name}")
    return {"name": name, "level": level_word(levels[name])}


def _change(name: str, word: str) -> HttpResponse:
    _describe(name)
    if word == _INHERIT and name != "root":
        logging.getLogger(name).setLevel(logging.NOTSET)
    elif word in LEVELS:
        logging.getLogger(name).setLevel(LEVELS[word])
    else:
        allowed = ", ".join(LEVELS if name == "root" else [*LEVELS, _INHERIT])
        raise BadRequest(f"level must be one of {allowed}.")
    logger.warning("Logger %s was set to the level %s.", name, word)
    return json_response(_describe(name))
