"""The parameters of an HTTP request."""

from urllib.parse import parse_qsl

from marserve.frontend.http.requests import HttpRequest
from marserve.frontend.operations.parameters import Parameters


def query_parameters(request: HttpRequest) -> Parameters:
    """Return the parameters in the query; of several with the same name the first counts."""
    return Parameters(dict(reversed(parse_qsl(request.query, keep_blank_values=True))))
