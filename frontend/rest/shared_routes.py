"""The routes of a listener that serves both inference and management.

Nearly all first segments of a path belong to one of them; of the others, inference has the paths
that end in its verbs:

    /models/{m}/invoke                    inference, unless there is a version named "invoke": then
                                          only POST invokes, and other methods manage the version
    /v1/models/{m}:predict, …:explain     inference, as OpenAI's paths below /v1 are
    /v2, except /v2/repository/models/…   inference
    everything else                       management

Each has its own key: management on a shared address needs the management key only.
"""

from collections.abc import Mapping

from marserve.frontend.http.requests import HttpRequest, PlainRequest
from marserve.frontend.http.router import Route
from marserve.frontend.rest.openai import is_openai
from marserve.frontend.serving.registry import ModelRegistry


def shared_routes(
    inference: Mapping[str, Route], other: Mapping[str, Route], registry: ModelRegistry
) -> Mapping[str, Route]:
    """Return the routes of two listeners that share an address.

    The first may be several listeners already; the ``other`` shares segments with inference only.
    """
    both = inference.keys() & other.keys()
    split = {first: _split(inference[first], other[first], registry) for first in both}
    return {**inference, **other, **split}


def _split(inference: Route, other: Route, registry: ModelRegistry) -> Route:
    def choose(request: HttpRequest | PlainRequest) -> Route:
        return inference if _is_inference(request, registry) else other

    return Route(inference.serve, choose=choose)


def _is_inference(request: HttpRequest | PlainRequest, registry: ModelRegistry) -> bool:
    match request.segments:
        case ["models", name, "invoke"]:
            return request.method == "POST" or not registry.has(name, "invoke")
        case ["v1", "models", target]:
            return target.endswith((":predict", ":explain"))
        case ["v1", *_]:
            return is_openai(request.segments)
        case ["v2", *rest]:
            return rest[:2] != ["repository", "models"]
    return False
