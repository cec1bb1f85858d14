"""KServe's first protocol: ``/v1/models/{m}:predict`` and ``/v1/models/{m}:explain``.

The server passes the body on as it is, unless the model wants lists taken apart (`client_lists`);
that a handler understands it is the business of the envelope which ``service_envelope`` names. The
second protocol is in `open_inference`.
"""

from collections.abc import Awaitable

from marserve.frontend.api.door import Route, Visit
from marserve.frontend.api.outputs import Answer
from marserve.frontend.api.predictor import Predictor
from marserve.frontend.errors import RouteNotFound

_EXPLAIN = {"predict": "False", "explain": "True"}


def kserve_route(predictor: Predictor) -> Route:
    """What answers below ``/v1`` on the inference listener."""

    def serve(visit: Visit) -> Awaitable[Answer]:
        match visit.segments:
            case [_, "models", target]:
                name, _, verb = target.rpartition(":")
                if name and verb in _EXPLAIN:
                    return predictor.predict(visit, name, extra={"explain": _EXPLAIN[verb]})
        raise RouteNotFound

    return Route(serve, "inference")
