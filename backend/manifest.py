"""MANIFEST.json of an archive: `Manifest` of a model, `WorkflowManifest` of a workflow.

Missing fields are accepted by reading, because a registration may supply a name, a runtime or a
handler; `Manifest.registered_as` checks them afterwards. Fields of a wrong type are refused.

Numbers in text fields are read as their literals (``"modelVersion": 1.10`` means ``"1.10"``), as
TorchServe does: manifests edited by hand depend on it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

MANIFEST_PATH = "MAR-INF/MANIFEST.json"
WORKFLOW_MANIFEST_PATH = "WAR-INF/MANIFEST.json"
RUNTIMES = ("python", "python3", "LSP")
DEFAULT_VERSION = "1.0"

_MAX_BYTES = 1 << 20  # of a file that is a page of text
_MAX_SEGMENT_BYTES = 255  # the limit of a file's name
_UNREADABLE = "Failed to parse signature.json."  # TorchServe's message, with the old file name

# Field to JSON key, in the order in which the archiver writes them.
_MODEL_KEYS = {
    "model_name": "modelName",
    "serialized_file": "serializedFile",
    "handler": "handler",
    "model_file": "modelFile",
    "model_version": "modelVersion",
    "extensions": "extensions",
    "requirements_file": "requirementsFile",
    "config_file": "configFile",
    "envelope": "envelope",
    "source_vocab": "sourceVocab",
}
_WORKFLOW_KEYS = {
    "workflow_name": "workflowName",
    "specification_file": "specFile",
    "handler": "handler",
}
_TOP_KEYS = {
    "created_on": "createdOn",
    "runtime": "runtime",
    "archiver_version": "archiverVersion",
}


class ManifestError(ValueError):
    """A manifest is unusable; the message is one sentence for the client."""


@dataclass(frozen=True)
class Manifest:
    """The manifest of a model; missing texts are empty.

    Attributes:
        handler: Built-in name, ``file.py``, ``file`` or either with ``:function``.
        runtime: One of `RUNTIMES`, if valid.
        serialized_file: Weights; paths of files are relative to the model directory.
        model_file: Python file with the model's class.
        config_file: YAML for frontend and handler.
        source_vocab: Vocabulary of text models (legacy).
        extensions: Members that the archiver's caller added.
        created_on: Local time, day/month/year.
        raw: The whole JSON object with unknown keys; empty if nothing was read.
    """

    model_name: str = ""
    model_version: str = ""
    handler: str = ""
    runtime: str = ""
    serialized_file: str = ""
    model_file: str = ""
    config_file: str = ""
    requirements_file: str = ""
    envelope: str = ""
    source_vocab: str = ""
    extensions: Mapping[str, object] = field(default_factory=dict, hash=False)
    archiver_version: str = ""
    created_on: str = ""
    raw: dict[str, object] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def parse(cls, text: str) -> "Manifest":
        """Parse the JSON text of a manifest; raises ManifestError."""
        raw, literal = _load_object(text)
        model = literal.get("model")
        if model is None:
            raise ManifestError("Missing Model entry in manifest file.")
        if not isinstance(model, dict):
            raise ManifestError("Manifest field model must be an object.")
        texts = {name: _text(literal, key, key) for name, key in _TOP_KEYS.items()}
        for name, key in _MODEL_KEYS.items():
            if name != "extensions":
                texts[name] = _text(model, key, f"model.{key}")
        extensions = raw["model"].get("extensions")
        if not isinstance(extensions, dict | None):
            raise ManifestError("Manifest field model.extensions must be an object.")
        return cls(**texts, extensions=extensions or {}, raw=raw)

    @classmethod
    def read(cls, model_dir: Path) -> "Manifest | None":
        """Read the manifest of a model directory, None if there is none; raises ManifestError."""
        text = _read_text(model_dir / MANIFEST_PATH)
        return None if text is None else cls.parse(text)

    @classmethod
    def implied(cls, name: str, handler: str) -> "Manifest":
        """Return the manifest for an archive without one."""
        return cls(
            model_name=name, model_version=DEFAULT_VERSION, handler=handler, runtime="python"
        )

    def registered_as(
        self,
        *,
        name: str = "",
        runtime: str = "",
        handler: str = "",
        fallback_name: str = "",
        fallback_handler: str = "",
        envelope: str = "",
    ) -> "Manifest":
        """Return the manifest with which a model is registered.

        ``name``, ``runtime`` and ``handler`` override the manifest's; the fallbacks replace missing
        ones. ``envelope``, the server's ``service_envelope``, replaces the manifest's even if it is
        empty. The default runtime is Python. Raises ManifestError.
        """
        registered = replace(
            self,
            model_name=name or self.model_name or fallback_name,
            model_version=self.model_version or DEFAULT_VERSION,
            runtime=runtime or self.runtime or RUNTIMES[0],
            handler=handler or self.handler or fallback_handler,
            envelope=envelope,
        )
        registered.validate()
        return registered

    def validate(self) -> None:
        """Raise ManifestError if name, version or runtime is missing or unusable."""
        if not self.model_name:
            raise ManifestError("Model name is not defined.")
        if not self.model_version:
            raise ManifestError("Model version is not defined.")
        for text in (self.model_name, self.model_version, self.handler):
            if not text.isprintable():
                raise ManifestError(f"Name, version and handler must be printable: {text[:80]!a}")
        check_addressable("Model name", self.model_name)
        check_addressable("Model version", self.model_version)
        if self.runtime not in RUNTIMES:
            raise ManifestError("Runtime is not defined or invalid.")

    def to_json(self) -> str:
        """Return the manifest as indented JSON, in order, without empty fields."""
        model = {key: getattr(self, name) for name, key in _MODEL_KEYS.items()}
        document = {
            "createdOn": self.created_on,
            "runtime": self.runtime,
            "model": {key: value for key, value in model.items() if value},
            "archiverVersion": self.archiver_version,
        }
        kept = {key: value for key, value in document.items() if value or key == "model"}
        return json.dumps(kept, indent=2)


@dataclass(frozen=True)
class WorkflowManifest:
    """The manifest of a workflow; missing texts are empty.

    Attributes:
        specification_file: YAML with the nodes and their dependencies.
        handler: Python file with the functions of nodes.
        created_on: Local time, day/month/year.
    """

    workflow_name: str = ""
    specification_file: str = ""
    handler: str = ""
    archiver_version: str = ""
    created_on: str = ""

    @classmethod
    def read(cls, directory: Path) -> "WorkflowManifest":
        """Read the manifest of a workflow's directory; raises ManifestError."""
        text = _read_text(directory / WORKFLOW_MANIFEST_PATH)
        return cls.parse("{}" if text is None else text)

    @classmethod
    def parse(cls, text: str) -> "WorkflowManifest":
        """Parse the JSON text of a manifest; raises ManifestError."""
        _, literal = _load_object(text)
        workflow = literal.get("workflow")
        if workflow is None:
            raise ManifestError("Missing Workflow entry in manifest file.")
        if not isinstance(workflow, dict):
            raise ManifestError("Manifest field workflow must be an object.")
        of_workflow = {
            name: _text(workflow, key, f"workflow.{key}") for name, key in _WORKFLOW_KEYS.items()
        }
        keys = {name: key for name, key in _TOP_KEYS.items() if name != "runtime"}
        return cls(**of_workflow, **{name: _text(literal, key, key) for name, key in keys.items()})

    def validate(self) -> None:
        """Raise ManifestError if a field is missing, or the name is unusable."""
        if not self.workflow_name:
            raise ManifestError("Workflow name is not defined.")
        if not self.archiver_version:
            raise ManifestError("Workflow archive version is not defined.")
        if not self.created_on:
            raise ManifestError("Workflow archive createdOn is not defined.")
        if not self.specification_file:
            raise ManifestError("Workflow specification file is not defined.")
        if not self.workflow_name.isprintable():
            raise ManifestError(f"Workflow name must be printable: {self.workflow_name[:80]!a}")
        check_addressable("Workflow name", self.workflow_name)

    def to_json(self) -> str:
        """Return the manifest as indented JSON, in order, without empty fields."""
        workflow = {key: getattr(self, name) for name, key in _WORKFLOW_KEYS.items()}
        document = {
            "createdOn": self.created_on,
            "workflow": {key: value for key, value in workflow.items() if value},
            "archiverVersion": self.archiver_version,
        }
        return json.dumps(document, indent=2)


def check_addressable(what: str, text: str) -> None:
    """Raise ManifestError if a name or version cannot be a segment of a request's path."""
    if "/" in text:
        raise ManifestError(f"{what} must not contain a slash.")
    if text in (".", ".."):  # clients and proxies remove these from a path
        raise ManifestError(f"{what} must not be {text!r}.")
    if len(text.encode()) > _MAX_SEGMENT_BYTES:
        raise ManifestError(f"{what} must not be longer than {_MAX_SEGMENT_BYTES} bytes.")


def _read_text(path: Path) -> str | None:
    if not path.is_file():
        return None
    with path.open("rb") as file:
        data = file.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise ManifestError(f"Manifest is longer than {_MAX_BYTES} bytes.")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ManifestError(_UNREADABLE) from error


def _load_object(text: str) -> tuple[dict[str, Any], dict[str, object]]:
    """Return the JSON object twice: as it is, and with every number as its literal."""
    try:
        raw = json.loads(text)
        literal = json.loads(text, parse_int=str, parse_float=str)
    except (ValueError, RecursionError) as error:
        raise ManifestError(_UNREADABLE) from error
    if not isinstance(raw, dict):
        raise ManifestError(_UNREADABLE)
    return raw, literal


def _text(members: Mapping[str, object], key: str, label: str) -> str:
    value = members.get(key)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ManifestError(f"Manifest field {label} must be a text.")
    # JSON can contain half a surrogate pair, which cannot be encoded as UTF-8.
    if "\0" in value or any("\ud800" <= each <= "\udfff" for each in value):
        raise ManifestError(f"Manifest field {label} contains characters that are not text.")
    return value
