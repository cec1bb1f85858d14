"""The model archive and the configuration that TorchServe and marserve get, word for word alike."""

import json
import zipfile
from collections.abc import Mapping
from typing import Any

from contract import Setting, Site

_HANDLER = """\
import models


class Handler:
    def initialize(self, context):
        self.model = models.load({name!r})

    def handle(self, data, context):
        return self.model([row["body"] for row in data])
"""


def pack_model(site: Site, setting: Setting) -> None:
    """Write ``store/model.mar``."""
    manifest = {
        "archiverVersion": "0.12.0",
        "model": {"modelName": "model", "handler": "handler.py", "modelVersion": "1.0"},
    }
    site.write("store/.keep", "")
    with zipfile.ZipFile(site.directory / "store" / "model.mar", "w") as archive:
        archive.writestr("MAR-INF/MANIFEST.json", json.dumps(manifest))
        archive.writestr("handler.py", _HANDLER.format(name=setting.model))
        archive.write(site.directory / "models.py", "models.py")


def properties(
    site: Site,
    setting: Setting,
    model: Mapping[str, Any] | None = None,
    more: Mapping[str, str] | None = None,
) -> str:
    """A config.properties with one worker for the model.

    Args:
        site: Whose ports.
        setting: What to write down.
        model: Further keys of the model's entry.
        more: Further keys of the file.
    """
    entry = {
        "defaultVersion": True,
        "marName": "model.mar",
        "minWorkers": 1,
        "maxWorkers": 1,
        "batchSize": setting.batch_size,
        "maxBatchDelay": setting.window_ms,
        "responseTimeout": 120,
        **(model or {}),
    }
    names = ("inference", "management", "metrics")
    lines = {
        f"{name}_address": f"http://127.0.0.1:{port}"
        for name, port in zip(names, site.ports, strict=False)
    }
    lines |= {
        f"grpc_{name}_port": str(port)
        for name, port in zip(names[:2], site.ports[len(names) :], strict=True)
    }
    lines |= {"model_store": "store", "load_models": "model.mar"}
    lines |= {"models": json.dumps({"model": {"1.0": entry}}), **(more or {})}
    return "".join(f"{key}={value}\n" for key, value in lines.items())
