"""A config.properties, with all keys and checks; snapshots are such files, too."""

import tempfile
from pathlib import Path

from fuzz.limits import Limits
from fuzz.oracles import check_refusal

from marserve.frontend.configuration.loading import load_config
from marserve.frontend.configuration.properties import ConfigError

LIMITS = Limits(calls=20_000, calls_per_byte=300, seconds=1.0)


def target(data: bytes) -> None:
    """It is read or refused with a sentence."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "config.properties")
        path.write_bytes(data)
        try:
            load_config(ts_config=str(path), environ={})
        except ConfigError as error:
            check_refusal(error)
