"""Queries: the parameters of management and of predictions, as Python's own parser reads them."""

from contextlib import suppress
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qsl

from fuzz.limits import Limits

from marserve.frontend.errors import BadRequest
from marserve.frontend.http.request_bodies import query_value
from marserve.frontend.http.requests import split_path
from marserve.frontend.operations.model_parameters import (
    changed_settings,
    read_worker_limits,
    registered_settings,
)
from marserve.frontend.rest.parameters import query_parameters

LIMITS = Limits(calls=10_000, calls_per_byte=60)


def target(data: bytes) -> None:
    """Every parameter is read or refused, and the first of a name counts."""
    query = data.decode("utf-8", "surrogateescape").partition("#")[0]
    request: Any = SimpleNamespace(query=query)
    pairs = parse_qsl(query, keep_blank_values=True)
    parameters = query_parameters(request)
    for name, value in reversed(dict(reversed(pairs)).items()):
        assert parameters.value(name) == value
        if not name or not name.isascii():
            continue
        # A broken escape is refused, which Python's own parser lets pass.
        with suppress(BadRequest):
            assert query_value(request, name) == value or not query.isascii()
    for read in (
        registered_settings,
        changed_settings,
        lambda found: read_worker_limits(found, strict=True),
    ):
        with suppress(BadRequest):
            read(parameters)
    split_path(f"/{query}")
