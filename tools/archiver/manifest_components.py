"""TorchServe's ``model_archiver.manifest_components``, for programs that write archives.

The classes are built on `marserve.backend.manifest`, as the archiver is.
"""

import enum
import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from marserve.backend import manifest
from marserve.tools.archiver.archiver import __version__


class RuntimeType(enum.Enum):
    """The runtime of a handler."""

    PYTHON = "python"
    PYTHON3 = "python3"
    LSP = "LSP"


class Model:
    """The model section of a manifest, with the last component of each path.

    Args:
        model_name: Name of the model.
        serialized_file: Path of the weights.
        handler: Built-in name, or path of a Python file.
        model_file: Path of the Python file with the model's class.
        model_version: Any text.
        extensions: Additional members, for the caller's use.
        requirements_file: Path of a pip requirements file.
        config_file: Path of the model's YAML file.

    Attributes:
        model_name, model_version: As given.
        handler: Last component of the given one.
        model_dict: The section.
    """

    def __init__(
        self,
        model_name: str,
        serialized_file: str | None,
        handler: str,
        model_file: str | None = None,
        model_version: str | None = None,
        extensions: Mapping[str, Any] | None = None,
        requirements_file: str | None = None,
        config_file: str | None = None,
    ) -> None:
        whole = manifest.Manifest(
            model_name=model_name,
            serialized_file=_last(serialized_file),
            handler=handler.rpartition("/")[2],
            model_file=_last(model_file),
            model_version=model_version or "",
            extensions=extensions or {},
            requirements_file=_last(requirements_file),
            config_file=_last(config_file),
        )
        self.model_name = model_name
        self.model_version = model_version
        self.handler = whole.handler
        self.model_dict: dict[str, Any] = json.loads(whole.to_json())["model"]

    def __str__(self) -> str:
        return json.dumps(self.model_dict)

    __repr__ = __str__


class Manifest:
    """A manifest with the current time.

    Args:
        runtime: Runtime of the handler.
        model: The model section.

    Attributes:
        manifest_dict: The whole manifest.

    Raises:
        ValueError: The runtime is unknown.
    """

    def __init__(self, runtime: str | RuntimeType, model: Model) -> None:
        self.runtime = RuntimeType(runtime)
        self.model = model
        self.manifest_dict: dict[str, Any] = {
            "createdOn": datetime.now().astimezone().strftime("%d/%m/%Y %H:%M:%S"),
            "runtime": self.runtime.value,
            "model": model.model_dict,
            "archiverVersion": __version__,
        }

    def __str__(self) -> str:
        return json.dumps(self.manifest_dict, indent=2)

    __repr__ = __str__


def _last(path: str | None) -> str:
    return Path(path or "").name
