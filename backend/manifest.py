"""MANIFEST.json of an archive: `Manifest` of a model, `WorkflowManifest` of a workflow.

Reading accepts missing fields, because a registration may supply a name, a runtime or a handler,
and refuses fields of a wrong type.

Numbers in text fields are read as their literals (``"modelVersion": 1.10`` means ``"1.10"``), as
TorchServe does.
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
    "archiver_version": "archiverVersion",
}


class ManifestError(ValueError):
    """A manifest is unusable; the message is one sentence for the client."""


@dataclass(frozen=True)
class Manifest:
    """The manifest of a model; missing texts are empty.

    Attributes:
        handler: Built-in name, ``file.py``, ``file`` or either with ``:function``.
        serialized_file: Weights; paths of files are relative to the model directory.
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
        keys = {name: key for name, key in _MODEL_KEYS.items() if name != "extensions"}
        raw, texts = _parse(text, "model", keys)
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
        """Return the manifest with which a model is registered; raises ManifestError.

        ``name``, ``runtime`` and ``handler`` override the manifest's; the fallbacks replace missing
        ones. ``envelope``, the server's ``service_envelope``, replaces the manifest's even if it is
        empty.
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
        return _to_json(self, "model", model)


@dataclass(frozen=True)
class WorkflowManifest:
    """The manifest of a workflow; missing texts are empty."""

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
        _, texts = _parse(text, "workflow", _WORKFLOW_KEYS)
        return cls(**texts)

    def validate(self) -> None:
        """Raise ManifestError if a field is missing, or the name is unusable."""
        for what, text in {
            "name": self.workflow_name,
            "archive version": self.archiver_version,
            "archive createdOn": self.created_on,
            "specification file": self.specification_file,
        }.items():
            if not text:
                raise ManifestError(f"Workflow {what} is not defined.")
        if not self.workflow_name.isprintable():
            raise ManifestError(f"Workflow name must be printable: {self.workflow_name[:80]!a}")
        check_addressable("Workflow name", self.workflow_name)

    def to_json(self) -> str:
        """Return the manifest as indented JSON, in order, without empty fields."""
        workflow = {key: getattr(self, name) for name, key in _WORKFLOW_KEYS.items()}
        return _to_json(self, "workflow", workflow)


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


def _parse(
    text: str, section: str, keys: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the JSON object, and its texts and those of a section by their fields."""
    try:
        raw = json.loads(text)
        literal = json.loads(text, parse_int=str, parse_float=str)
    except (ValueError, RecursionError) as error:
        raise ManifestError(_UNREADABLE) from error
    if not isinstance(raw, dict):
        raise ManifestError(_UNREADABLE)
    members = literal.get(section)
    if members is None:
        raise ManifestError(f"Missing {section.capitalize()} entry in manifest file.")
    if not isinstance(members, dict):
        raise ManifestError(f"Manifest field {section} must be an object.")
    top_keys = _TOP_KEYS | ({"runtime": "runtime"} if section == "model" else {})
    texts = {name: _text(literal, key, key) for name, key in top_keys.items()}
    texts |= {name: _text(members, key, f"{section}.{key}") for name, key in keys.items()}
    return raw, texts


def _to_json(
    manifest: Manifest | WorkflowManifest, section: str, members: Mapping[str, object]
) -> str:
    document = {
        "createdOn": manifest.created_on,
        "runtime": getattr(manifest, "runtime", ""),
        section: {key: value for key, value in members.items() if value},
        "archiverVersion": manifest.archiver_version,
    }
    kept = {key: value for key, value in document.items() if value or key == section}
    return json.dumps(kept, indent=2)


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
