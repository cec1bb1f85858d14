"""model-config.yaml of an archive: what the server reads of it."""

import tempfile
from pathlib import Path

from fuzz.limits import Limits
from fuzz.oracles import check_refusal

from marserve.frontend.archives.contents import read_model_yaml
from marserve.frontend.errors import ArchiveRefused
from marserve.frontend.settings.model_yaml import check_yaml, yaml_settings

# A short text may stand for 100,000 values; PyYAML calls several functions for a character.
LIMITS = Limits(calls=600_000, calls_per_byte=250)


def target(data: bytes) -> None:
    """It is read, ignored with a log record, or refused."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model-config.yaml")
        path.write_bytes(data)
        try:
            parsed = read_model_yaml(path)
            check_yaml(parsed, yaml_settings(parsed, gpus=2))
        except ArchiveRefused as error:
            check_refusal(error)
