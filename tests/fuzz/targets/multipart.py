"""Bodies of type multipart/form-data, as they are and with their parts repeated to a large body."""

from fuzz.limits import Limits
from fuzz.targets.forms import read_form

# Most of it is work for the body of repeated parts.
EXAMPLES = 60
LIMITS = Limits(calls=1_500_000, calls_per_byte=3_000, seconds=1.0, memory=24 << 20)
BOUNDARY = b"b0"
_LARGE_BYTES = 1 << 19
_END = b"--b0--"


def target(data: bytes) -> None:
    """A body is read or refused, and none stops the event loop."""
    _read(data)
    if data:
        part = data.partition(_END)[0] or data
        _read(part * (_LARGE_BYTES // len(part)) + _END)


def _read(body: bytes) -> None:
    input_, status = read_form(body, b"multipart/form-data; boundary=" + BOUNDARY)
    assert status == 200 if input_ else status in (400, 413)
