"""The headers by which a request has a timeout or a priority; the two lines of an input."""

import math

from fuzz.limits import Limits
from fuzz.oracles import check_refusal

from marserve.frontend.errors import BadRequest
from marserve.frontend.operations.request_options import read_request_options

LIMITS = Limits(calls=300, calls_per_byte=5)


def target(data: bytes) -> None:
    """A timeout is above 0, or it is refused."""
    timeout, _, priority = data.decode("latin-1").partition("\n")
    headers = {"x-timeout-ms": timeout} | ({"x-priority": priority} if priority else {})
    try:
        options = read_request_options(headers)
    except BadRequest as error:
        check_refusal(error)
        return
    assert 0 < options.timeout <= math.inf
