"""Read the manifest and the specification of a workflow's files, in a helper process (`helper`).

`marserve.frontend.workflows.specification` interprets the values.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marserve.backend.manifest import ManifestError, WorkflowManifest
from marserve.frontend.archives.contents import path_inside
from marserve.frontend.archives.local_files import NoFile, open_file
from marserve.frontend.configuration.bounded_yaml import YamlTooLarge, read_yaml
from marserve.frontend.configuration.setting_kinds import short_repr
from marserve.frontend.errors import ArchiveRefused, WorkflowNotFound, WorkflowRefused
from marserve.frontend.logs.formats import one_line

logger = logging.getLogger(__name__)

_MAX_BITS = 64  # of an integer; no key of a specification takes larger ones


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


def find_workflow(url: str, store: Path) -> Path:
    """Return the file in the store whose name is the last part of a URL without scheme."""
    path = store / Path(url).name
    try:
        is_there, is_file = path.exists(), path.is_file()
    except (OSError, ValueError):  # too long, or a null byte
        is_there = is_file = False
    if not is_there:
        raise WorkflowNotFound(f"Workflow not found in workflow store: {url}")
    if not is_file:
        raise WorkflowNotFound(f"Workflow not found at: {url}")
    return path


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
            return _plain(read_yaml(file))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise WorkflowRefused(f"{path.name} is not in the archive.") from error
    except (YamlTooLarge, NoFile) as error:
        raise WorkflowRefused(f"{path.name} {error}.") from error
    except WorkflowRefused:
        raise
    except Exception as error:  # the parser may raise anything for untrusted text
        logger.info("Cannot read %s: %s", path.name, one_line(error))
        raise WorkflowRefused("Failed to parse yaml.") from error


def _plain(value: Any) -> Any:
    match value:
        case None | bool() | float() | str():
            return value
        case int() if value.bit_length() <= _MAX_BITS:
            return value
        case dict():
            return {_key(key): _plain(each) for key, each in value.items()}
        case list():
            return [_plain(each) for each in value]
    raise WorkflowRefused(f"The specification holds a value of no use there: {short_repr(value)}")


def _key(key: Any) -> str:
    if not isinstance(key, str):
        raise WorkflowRefused(f"The specification has a name that is no text: {short_repr(key)}")
    return key
