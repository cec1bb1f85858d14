"""What `loggers` offers, as rows for the description of the management listener."""

from collections.abc import Sequence

from marserve.frontend.logs.levels import LEVELS
from marserve.frontend.rest.openapi_operations import Operation, errors, query_parameter
from marserve.frontend.rest.openapi_schemas import Json, content, listing, record, text

LOGGER_NAME: Json = text("Name of the logger; `root` for the one above all others.")

_LOGGER = record(
    name=text("Name of the logger."),
    level=text("The least level it lets through: debug, info, warn, error, fatal or off."),
)
_ONE: Json = {"description": "The logger.", **content(_LOGGER)}
_ALL: Json = {"description": "All loggers.", **content(record(loggers=listing(_LOGGER)))}

LOGGERS: Sequence[Operation] = [
    Operation(
        "get /loggers",
        "listLoggers",
        "List the loggers and their levels.",
        {200: _ALL, **errors(400, 403)},
        "management",
    ),
    Operation(
        "get /loggers/{logger_name}",
        "describeLogger",
        "Get the level of a logger.",
        {200: _ONE, **errors(400, 403, 404)},
        "management",
    ),
    Operation(
        "put /loggers/{logger_name}",
        "setLevel",
        "Set the level of a logger, until the server ends.",
        {200: _ONE, **errors(400, 403, 404)},
        "management",
        [
            query_parameter(
                "level",
                text("The level; `inherit`: that of the logger above.", enum=[*LEVELS, "inherit"]),
                required=True,
            )
        ],
    ),
]
