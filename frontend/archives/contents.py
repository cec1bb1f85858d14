"""What the server has to know of a model's files: manifest, settings, which files are there.

All of it is foreign, and read in a process of its own (`helper`). So this imports little.
"""

import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from marserve.backend.manifest import Manifest, ManifestError
from marserve.frontend.archives.local_files import NoFile, open_file
from marserve.frontend.configuration.bounded_yaml import YamlTooLarge, read_yaml
from marserve.frontend.configuration.setting_kinds import short_repr
from marserve.frontend.errors import ArchiveRefused
from marserve.frontend.logs.formats import one_line

logger = logging.getLogger(__name__)

_MAX_BITS = 128  # of a number that is passed on; no setting takes larger ones
_MAX_OTHER_KEYS = 500  # that are looked at one by one
_MAX_KEY = 200  # characters
_UNUSABLE = "unusable value"
_SAMPLE_KEY = "sampleInput"
_MAX_SAMPLES = 100  # more are refused in any case


@dataclass(frozen=True)
class Contents:
    """What the server has to know of a model's files."""

    manifest: Manifest | None = None
    #: What model-config.yaml has for the server; of other keys the names, and no values.
    model_yaml: Mapping[str, Any] = field(default_factory=dict)
    has_samples: bool = False  # whether all files are there that its sampleInput names

    def as_json(self) -> dict[str, Any]:
        """As JSON has it, but for members of the manifest that only workers read."""
        manifest = self.manifest and asdict(self.manifest) | {"raw": {}, "extensions": {}}
        return {
            "manifest": manifest,
            "model_yaml": _plain(self.model_yaml),
            "has_samples": self.has_samples,
        }

    @classmethod
    def from_json(cls, members: Mapping[str, Any]) -> "Contents":
        """The reverse of `as_json`."""
        manifest = members["manifest"]
        return cls(
            manifest and Manifest(**manifest),
            _revived(members["model_yaml"]),
            members["has_samples"],
        )


class Unusable:
    """Stands for a value of a yaml that no setting takes: a date, say, or an endless number."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def read_contents(
    directory: Path, known_keys: Sequence[str] = (), *, needs_requirements: bool = False
) -> Contents:
    """Read what the server has to know of a model directory; blocks.

    Raises:
        ArchiveRefused: The model cannot be served so.
    """
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
    named = parsed.get(_SAMPLE_KEY)
    samples = named if isinstance(named, list) else [named]
    return Contents(
        manifest,
        _without_other_values(parsed, known_keys),
        all(
            isinstance(sample, str) and _is_file_in(directory.resolve(), sample)
            for sample in samples[:_MAX_SAMPLES]
        ),
    )


def read_model_yaml(path: Path) -> Mapping[str, Any]:
    """Read model-config.yaml; unreadable counts as absent here (the worker then fails to load).

    Raises:
        ArchiveRefused: It is no file, or larger than it may be.
    """
    try:
        with open_file(path) as file:
            parsed = read_yaml(file)
    except (YamlTooLarge, NoFile) as error:
        raise ArchiveRefused(f"{path.name} {error}.") from error
    except Exception as error:  # noqa: BLE001 - the user's file meets the parser's every corner
        logger.error("Cannot read %s: %s", path.name, one_line(error))  # noqa: TRY400 - said in full
        return {}
    return parsed if isinstance(parsed, dict) else {}


def path_inside(directory: Path, name: str) -> Path:
    """A file of the archive; the manifest is foreign and may point elsewhere.

    Raises:
        ArchiveRefused: It does.
    """
    try:
        path = (directory / name).resolve()
        is_inside = path.is_relative_to(directory.resolve())
    except (OSError, ValueError, RuntimeError):  # too long, a null byte, links in a circle
        is_inside = False
    if not is_inside:
        raise ArchiveRefused(f"The manifest points outside the archive: {name}")
    return path


def _is_file_in(directory: Path, name: str) -> bool:
    try:
        path = (directory / name).resolve()
        return path.is_relative_to(directory) and path.is_file()
    except (OSError, ValueError, RuntimeError):
        return False


def _without_other_values(
    parsed: Mapping[Any, Any], known_keys: Sequence[str]
) -> Mapping[str, Any]:
    """What there is for the known keys, and of others the names, in the order of the document."""
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
    return {_UNUSABLE: short_repr(value)}


def _revived(value: Any) -> Any:
    match value:
        case dict() if value.keys() == {_UNUSABLE}:
            return Unusable(str(value[_UNUSABLE]))
        case dict():
            return {key: _revived(each) for key, each in value.items()}
        case list():
            return [_revived(each) for each in value]
    return value
