"""KServe's first protocol: ``/v1/models/{m}:predict`` and ``/v1/models/{m}:explain``.

The server passes the body on as it is, unless the model wants lists taken apart (`client_lists`);
that a handler understands it is the business of the envelope which ``service_envelope`` names. The
second protocol is in `open_inference`.
"""

from collections.abc import Awaitable

from marserve.frontend.errors import RouteNotFound
from marserve.frontend.http.responses import HttpResponse
from marserve.frontend.http.router import HttpRequest, Route
from marserve.frontend.rest.predict import Predictor

_EXPLAIN = {"predict": "False", "explain": "True"}


def kserve_route(predictor: Predictor) -> Route:
    """What answers below ``/v1`` on the inference listener."""

    def serve(request: HttpRequest) -> Awaitable[HttpResponse]:
        match request.segments:
            case [_, "models", target]:
                name, _, verb = target.rpartition(":")
                if name and verb in _EXPLAIN:
                    return predictor.predict(request, name, extra={"explain": _EXPLAIN[verb]})
        raise RouteNotFound

    return Route(serve, "inference")
