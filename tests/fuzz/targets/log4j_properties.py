"""A log configuration of log4j's in properties, of version 1 or 2."""

from fuzz.limits import Limits
from fuzz.targets import log4j_xml

EXAMPLES = 60
LIMITS = Limits(calls=600_000, calls_per_byte=200, seconds=1.0, memory=16 << 20)


def target(data: bytes) -> None:
    """It is read, with remarks on what was not taken over, or refused."""
    log4j_xml.target(data, ".properties")
