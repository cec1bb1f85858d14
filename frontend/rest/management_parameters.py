"""What requests to register or scale a model ask for, beyond its settings."""

import json

from marserve.frontend.configuration.model_schema import MAX_WORKERS
from marserve.frontend.errors import BadRequest
from marserve.frontend.http.parameters import Parameters, query_parameters
from marserve.frontend.http.request_bodies import read_body
from marserve.frontend.http.router import HttpRequest
from marserve.frontend.models.resolver import Registration
from marserve.frontend.models.settings.model_settings import Requested
from marserve.frontend.rest.model_parameters import registered_settings

_RUNTIMES = ("python", "python3", "LSP")


async def read_registration(request: HttpRequest, max_bytes: int) -> Registration:
    """What a request to register a model asks for.

    Args:
        request: With a JSON body, or else a query.
        max_bytes: Longest body.

    Raises:
        BadRequest: A parameter is missing or cannot be used.
        PayloadTooLarge: The body is longer.
    """
    parameters = await _parameters(request, max_bytes)
    if not parameters.has("url"):
        raise BadRequest("Parameter url is required.")
    runtime = parameters.text("runtime")
    if runtime and runtime not in _RUNTIMES:
        raise BadRequest(f"Invalid RuntimeType value: {runtime}")
    initial_workers = parameters.at_least("initial_workers", 0)
    _check_workers(initial_workers or 0)
    return Registration(
        url=parameters.text("url"),
        model_name=parameters.text("model_name"),
        handler=parameters.text("handler"),
        runtime=runtime,
        synchronous=parameters.flag("synchronous", default=True),
        s3_sse_kms=parameters.flag("s3_sse_kms", default=False),
        requested=Requested(
            initial_workers=initial_workers,
            settings=registered_settings(parameters),
        ),
    )


def read_worker_limits(query: Parameters, *, strict: bool) -> tuple[int, int]:
    """How many workers a model shall have, at least and at most.

    Args:
        query: Of the request.
        strict: Whether a number that is none is refused, rather than left out.

    Raises:
        BadRequest: That is not possible.
    """

    def count(name: str, default: int) -> int:
        number = query.number(name)
        if number is None:
            return -1 if strict and query.has(name) else default
        return number

    low = count("min_worker", 1)
    high = count("max_worker", low)
    if low < 0:
        raise BadRequest("min_worker cannot be less than 0.")
    _check_workers(low)
    if high < low:
        raise BadRequest("max_worker cannot be less than min_worker.")
    return low, high


async def _parameters(request: HttpRequest, max_bytes: int) -> Parameters:
    content_type = request.headers.get("content-type", "")
    body = await read_body(request, max_bytes)
    if content_type.partition(";")[0].strip().lower() != "application/json":
        return query_parameters(request)
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"The body is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise BadRequest("The body is not a JSON object.")
    return Parameters(document)


def _check_workers(count: int) -> None:
    if count > MAX_WORKERS:
        raise BadRequest(f"No model can have {count} workers; the most are {MAX_WORKERS}.")
