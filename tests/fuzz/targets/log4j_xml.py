"""A log configuration of log4j's in XML."""

import tempfile
from pathlib import Path

from fuzz.limits import Limits
from fuzz.oracles import check_refusal

from marserve.frontend.configuration.properties import ConfigError
from marserve.frontend.logs.config import read_log_config

EXAMPLES = 60
LIMITS = Limits(calls=600_000, calls_per_byte=200, seconds=1.0, memory=16 << 20)
ENDING = ".xml"


def target(data: bytes, ending: str = ENDING) -> None:
    """It is read, with remarks on what was not taken over, or refused."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"log4j2{ending}")
        path.write_bytes(data)
        try:
            read_log_config(path, {"LOG_LOCATION": folder, "METRICS_LOCATION": folder})
        except ConfigError as error:
            check_refusal(error)
