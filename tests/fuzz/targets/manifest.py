"""MANIFEST.json of an archive."""

import json
import tempfile
from pathlib import Path

from fuzz.limits import Limits
from fuzz.oracles import check_refusal

from marserve.backend.manifest import MANIFEST_PATH, Manifest, ManifestError

LIMITS = Limits(calls=3_000, calls_per_byte=30)


def target(data: bytes) -> None:
    """It is read or refused; what is registered can be written, and read as the same."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, MANIFEST_PATH)
        path.parent.mkdir()
        path.write_bytes(data)
        try:
            read = Manifest.read(Path(folder))
            assert read is not None
            registered = read.registered_as(fallback_name="m", fallback_handler="h.py")
        except ManifestError as error:
            check_refusal(error)
            return
    again = Manifest.parse(registered.to_json())
    for name in ("model_name", "model_version", "handler", "runtime", "serialized_file"):
        assert getattr(again, name) == getattr(registered, name), name
        getattr(again, name).encode()
    json.dumps(registered.raw)
