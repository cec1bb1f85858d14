"""A log configuration of Python's in YAML."""

from fuzz.limits import Limits
from fuzz.targets import log4j_xml

LIMITS = Limits(calls=600_000, calls_per_byte=250)


def target(data: bytes) -> None:
    """It is read or refused."""
    log4j_xml.target(data, ".yaml")
