"""Read the manifest and the settings of a model's files, or the specification of a workflow's.

The files are untrusted: this runs in a helper process (`helper`), and so imports little.
"""

import itertools
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from marserve.backend.manifest import Manifest, ManifestError, WorkflowManifest
from marserve.backend.openai_names import adapter_names, served_names
from marserve.frontend.configuration.bounded_yaml import YamlTooLarge, read_yaml
from marserve.frontend.configuration.setting_kinds import short_repr
from marserve.frontend.errors import ArchiveRefused, WorkflowRefused
from marserve.frontend.logs.formats import one_line
from marserve.frontend.regular_files import NoFile, open_file

logger = logging.getLogger(__name__)

_MAX_BITS = 128  # of an integer; no setting takes larger ones
_MAX_SPECIFICATION_BITS = 64  # of an integer in the specification of a workflow
_MAX_OTHER_KEYS = 500  # unknown keys that are returned
_MAX_KEY = 200  # characters
_UNUSABLE = "unusable value"  # the key of such a value in JSON
_MAX_SAMPLES = 100  # more are refused in any case
#: The end of a sentence about a model-config.yaml such as ``batchSize:4``.
NOT_A_MAP = "is not a map of keys: none of its settings count"
_GPU = re.compile(r"cuda(?::(\d{1,4}))?", re.ASCII)


@dataclass(frozen=True)
class Contents:
    """Manifest and settings of a model's files."""

    manifest: Manifest | None = None
    model_yaml: Mapping[str, Any] = field(default_factory=dict)  # unknown keys have the value None
    has_samples: bool = False  # whether all files exist that ``sampleInput`` names
    openai_names: Sequence[str] = ()  # by which OpenAI's clients address it (`backend`)
    stage_gpus: int = 0  # GPUs, numbered from 0, that ``optimization.device_stages`` needs

    def as_json(self) -> dict[str, Any]:
        """Return a JSON object, without members of the manifest that only workers read."""
        manifest = self.manifest and asdict(self.manifest) | {"raw": {}, "extensions": {}}
        return {**vars(self), "manifest": manifest, "model_yaml": _plain(self.model_yaml)}

    @classmethod
    def from_json(cls, members: Mapping[str, Any]) -> "Contents":
        """Return the contents that `as_json` has described."""
        manifest = members["manifest"] and Manifest(**members["manifest"])
        model_yaml = _restored(members["model_yaml"])
        return cls(**{**members, "manifest": manifest, "model_yaml": model_yaml})


class UnusableValue:
    """A value of a yaml that no setting accepts; its repr is that of the value."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def read_contents(
    directory: Path, known_keys: Sequence[str] = (), *, needs_requirements: bool = False
) -> Contents:
    """Read manifest and settings of a model directory; raises ArchiveRefused."""
    try:
        manifest = Manifest.read(directory)
    except ManifestError as error:
        raise ArchiveRefused(str(error)) from error
    if manifest is None:
        return Contents()
    requirements = manifest.requirements_file if needs_requirements else ""
    if requirements and not path_inside(directory, requirements).is_file():
        raise ArchiveRefused(f"The requirements file is not in the archive: {requirements}")
    if not manifest.config_file:
        return Contents(manifest)
    parsed = read_model_yaml(path_inside(directory, manifest.config_file))
    named = parsed.get("sampleInput")
    samples = named if isinstance(named, list) else [named]
    return Contents(
        manifest,
        _without_other_values(parsed, known_keys),
        all(
            isinstance(sample, str) and _is_file_in(directory, sample)
            for sample in samples[:_MAX_SAMPLES]
        ),
        _openai_names(parsed.get("handler")),
        _stage_gpus(parsed.get("optimization")),
    )


def read_model_yaml(path: Path) -> Mapping[str, Any]:
    """Read model-config.yaml; return an empty mapping for invalid YAML, with which no worker loads.

    Raises ArchiveRefused for what is not a file, or too large.
    """
    try:
        with open_file(path) as file:
            parsed = read_yaml(file)
    except (YamlTooLarge, NoFile) as error:
        raise ArchiveRefused(f"{path.name} {error}.") from error
    except Exception as error:  # noqa: BLE001 - the parser may raise anything for untrusted text
        logger.error("Cannot read %s: %s", path.name, one_line(error))  # noqa: TRY400 - said in full
        return {}
    if isinstance(parsed, dict):
        return parsed
    if parsed is not None:
        logger.error("%s %s: %s", path.name, NOT_A_MAP, short_repr(parsed))
    return {}


def path_inside(directory: Path, name: str) -> Path:
    """Return the path of a file that the manifest names; raises ArchiveRefused outside."""
    try:
        path = (directory / name).resolve()
        is_inside = path.is_relative_to(directory.resolve())
    except (OSError, ValueError, RuntimeError):  # too long, a null byte, a cycle of links
        is_inside = False
    if not is_inside:
        raise ArchiveRefused(f"The manifest points outside the archive: {name}")
    return path


def _is_file_in(directory: Path, name: str) -> bool:
    try:
        return path_inside(directory, name).is_file()
    except (ArchiveRefused, OSError):
        return False


def _openai_names(handler: Any) -> Sequence[str]:
    if not isinstance(handler, dict):
        return ()
    try:
        return [*served_names(handler), *adapter_names(handler)]
    except ValueError:  # a number with too many digits
        return ()


def _stage_gpus(optimization: Any) -> int:
    stages = optimization.get("device_stages") if isinstance(optimization, dict) else None
    names = filter(lambda each: isinstance(each, str), stages if isinstance(stages, list) else ())
    return max((int(gpu[1] or 0) + 1 for gpu in map(_GPU.fullmatch, names) if gpu), default=0)


def _without_other_values(
    parsed: Mapping[Any, Any], known_keys: Sequence[str]
) -> Mapping[str, Any]:
    """Replace the values of unknown keys by None, and drop unknown keys beyond the limits."""
    found: dict[str, Any] = {}
    others = itertools.count(1)
    for key, value in parsed.items():
        if key in known_keys:
            found[key] = value
        elif isinstance(key, str) and len(key) <= _MAX_KEY and next(others) <= _MAX_OTHER_KEYS:
            found[key] = None
    return found


def _plain(value: Any) -> Any:
    match value:
        case None | bool() | float() | str():
            return value
        case int() if value.bit_length() <= _MAX_BITS:
            return value
        case dict():
            return {key: _plain(each) for key, each in value.items() if isinstance(key, str)}
        case list() | tuple():
            return [_plain(each) for each in value]
    # No setting accepts a date, say, or a huge number: the kinds of text must not see a text.
    return {_UNUSABLE: short_repr(value)}


def _restored(value: Any) -> Any:
    match value:
        case dict() if value.keys() == {_UNUSABLE}:
            return UnusableValue(str(value[_UNUSABLE]))
        case dict():
            return {key: _restored(each) for key, each in value.items()}
        case list():
            return [_restored(each) for each in value]
    return value


# Workflows ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WorkflowContents:
    """The manifest and the specification of a workflow, in the types of JSON."""

    manifest: WorkflowManifest
    specification: Any
    has_handler: bool  # whether the manifest's handler file exists

    @classmethod
    def from_json(cls, members: Mapping[str, Any]) -> "WorkflowContents":
        """Return the contents whose members a helper process has sent."""
        manifest = WorkflowManifest(**members["manifest"])
        return cls(manifest, members["specification"], members["has_handler"])


def read_workflow_contents(directory: Path) -> WorkflowContents:
    """Read manifest and specification of a workflow's directory; raises WorkflowRefused."""
    try:
        manifest = WorkflowManifest.read(directory)
        specification = None
        if manifest.specification_file:
            path = path_inside(directory, manifest.specification_file)
            specification = _read_specification(path)
        handler = manifest.handler
        has_handler = bool(handler) and path_inside(directory, handler).is_file()
    except ManifestError as error:
        raise WorkflowRefused(str(error)) from error
    except ArchiveRefused as error:
        raise WorkflowRefused(error.message) from error
    return WorkflowContents(manifest, specification, has_handler)


def _read_specification(path: Path) -> Any:
    try:
        with open_file(path) as file:
            return _strictly_plain(read_yaml(file))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise WorkflowRefused(f"{path.name} is not in the archive.") from error
    except (YamlTooLarge, NoFile) as error:
        raise WorkflowRefused(f"{path.name} {error}.") from error
    except WorkflowRefused:
        raise
    except Exception as error:  # the parser may raise anything for untrusted text
        logger.info("Cannot read %s: %s", path.name, one_line(error))
        raise WorkflowRefused("Failed to parse yaml.") from error


def _strictly_plain(value: Any) -> Any:
    match value:
        case None | bool() | float() | str():
            return value
        case int() if value.bit_length() <= _MAX_SPECIFICATION_BITS:
            return value
        case dict():
            return {_key(key): _strictly_plain(each) for key, each in value.items()}
        case list():
            return [_strictly_plain(each) for each in value]
    raise WorkflowRefused(f"The specification holds a value of no use there: {short_repr(value)}")


def _key(key: Any) -> str:
    if not isinstance(key, str):
        raise WorkflowRefused(f"The specification has a name that is not a text: {short_repr(key)}")
    return key
