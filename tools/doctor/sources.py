"""Find the files of a directory that concern TorchServe, and their kinds.

The content decides where the name is not specific: a `config.properties` counts if it contains a
key of TorchServe. Files without a check are skipped silently.
"""

import codecs
import os
import re
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property
from pathlib import Path

from marserve.backend.manifest import MANIFEST_PATH, WORKFLOW_MANIFEST_PATH
from marserve.frontend.configuration.config import KEYS
from marserve.frontend.configuration.model_schema import BY_KEY
from marserve.frontend.configuration.properties import ConfigError, parse_properties
from marserve.frontend.configuration.unread_keys import WITHOUT_EFFECT
from marserve.frontend.errors import ServeError
from marserve.tools.doctor.contents import open_zip
from marserve.tools.files import MAX_BYTES, open_regular, read_beginning, read_file

_MAX_FILES = 50_000  # and directories
_MAX_TEXT = 64 << 20  # bytes of all sources that are text
_SKIPPED = {
    "node_modules",
    "__pycache__",
    "site-packages",
    "dist-packages",
    "third_party",
    "venv",
    ".venv",
    "build",
    "dist",
}
_SERVERS = re.compile(r"torchserve|torch-model-archiver|pytorch/serve|ts_scripts/|\bts\.")
_WAITS = re.compile(r":808[01]/(?:ping|models)\b")
_LOGGERS = re.compile(r"org\.pytorch\.serve|com\.amazonaws\.ml\.ts|MODEL_LOG|ACCESS_LOG|TS_METRICS")
_IMPORTS = re.compile(r"(?m)^[ \t]*(?:from|import)\s+(?:ts|model_archiver|workflow_archiver)\b")
_ARCHIVES = (".mar", ".war", ".model", ".tar.gz", ".tgz")


class Kind(Enum):
    """The kind of a source."""

    PROPERTIES = auto()
    LOG4J = auto()
    ARCHIVE = auto()  # for an unpacked one the path is a directory
    DOCKERFILE = auto()
    YAML = auto()  # compose, Kubernetes, Helm, models, metrics
    SHELL = auto()
    REQUIREMENTS = auto()
    PYTHON = auto()
    PLUGIN = auto()  # a .jar
    UNREADABLE = auto()  # `Source.content` raises the reason


@dataclass(frozen=True)
class Source:
    """A file, or an unpacked archive.

    Attributes:
        name: The name in reports.
        holder: The file that contains it; None for a separate file.
        embedded: The content, if it is embedded in `holder`.
        problem: Why it cannot be read, if the system reports no error.
    """

    path: Path
    name: str
    kind: Kind
    holder: Path | None = None
    embedded: bytes | None = None
    problem: str = ""

    @property
    def folder(self) -> Path:
        """The directory of the file, or of its holder."""
        return (self.holder or self.path).parent

    @cached_property
    def content(self) -> bytes:
        """The content; raises OSError if it cannot be read or is too long."""
        if self.problem:
            raise OSError(0, self.problem)
        return read_file(self.path) if self.embedded is None else self.embedded

    @cached_property
    def text(self) -> str:
        """The decoded content; raises as `content` does."""
        return decode(self.content)[0]

    @cached_property
    def lines(self) -> list[str]:
        """The lines of the text, numbered as in the server's configuration."""
        return re.split(r"\r\n|\r|\n", self.text)

    def line_of(self, pattern: str) -> int:
        """Return the number of the first line that contains a text, or 0."""
        return next((at for at, line in enumerate(self.lines, 1) if pattern in line), 0)


def decode(content: bytes) -> tuple[str, str]:
    """Return the text of a file and its encoding."""
    try:
        encoding = "utf-8-sig" if content.startswith(codecs.BOM_UTF8) else "utf-8"
        return content.decode(encoding), encoding
    except UnicodeDecodeError:
        return content.decode("latin-1"), "latin-1"


def find_sources(root: Path) -> Iterator[Source]:
    """Return the sources of a file or directory in the order of their names."""
    if not os.path.isdir(root):  # noqa: PTH112 - raises nothing
        if source := _source_of(root, root.name):
            yield source
        return
    if is_unpacked(root):
        yield Source(root, root.name, Kind.ARCHIVE)
        return
    yield from _in_directory(root)


def embedded_source(holder: Source, name: str, text: str) -> Source | None:
    """Return the source of a file embedded in another one; None if no check reads it."""
    kind, content = _kind_of_text(name.lower(), lambda: text), text.encode(errors="replace")
    return kind and Source(Path(name), f"{holder.name}/{name}", kind, holder.path, content)


def _in_directory(root: Path) -> Iterator[Source]:
    count = size = 0
    closed: list[OSError] = []
    for folder, folders, files in os.walk(root, onerror=closed.append):
        here = Path(folder)
        for name in sorted(folders):
            if is_unpacked(here / name):
                yield Source(here / name, str((here / name).relative_to(root)), Kind.ARCHIVE)
        count += len(folders)
        folders[:] = sorted(
            name
            for name in folders
            if name not in _SKIPPED and name[0] != "." and not is_unpacked(here / name)
        )
        for name in sorted(files):
            count += 1
            if count > _MAX_FILES or size > _MAX_TEXT:
                what = f"{_MAX_FILES} files" if count > _MAX_FILES else f"{_MAX_TEXT >> 20} MiB"
                problem = f"only its first {what} are examined"
                yield Source(root, ".", Kind.UNREADABLE, problem=problem)
                return
            if source := _source_of(here / name, str((here / name).relative_to(root))):
                yield source
                if source.kind not in (Kind.ARCHIVE, Kind.PLUGIN, Kind.UNREADABLE):
                    size += min(source.path.stat().st_size, MAX_BYTES)
    for path in (Path(error.filename) for error in closed):
        yield Source(path, str(path.relative_to(root)), Kind.UNREADABLE)


def is_unpacked(directory: Path) -> bool:
    """Return whether a directory is an unpacked model or workflow."""
    names = (MANIFEST_PATH, WORKFLOW_MANIFEST_PATH)
    # Not Path.exists(), which raises an error without permission.
    return any(os.path.exists(directory / name) for name in names)  # noqa: PTH110


def _source_of(path: Path, name: str) -> Source | None:
    try:
        kind = _kind_of(path)
    except FileNotFoundError:  # a broken link
        return None
    except OSError:
        kind = Kind.UNREADABLE
    return kind and Source(path, name, kind)


def _kind_of(path: Path) -> Kind | None:
    name = path.name.lower()
    if re.search(r"\.orig(\.\d+)?$", name):  # a backup of --write
        return None
    if name.endswith(_ARCHIVES):
        open_regular(path).close()
        return Kind.ARCHIVE
    if name.endswith(".jar"):
        return Kind.PLUGIN if _is_plugin(path) else None
    return _kind_of_text(name, lambda: read_beginning(path).decode(errors="replace"))


def _is_plugin(path: Path) -> bool:
    """Return whether a .jar registers a service of TorchServe."""
    try:
        with open_zip(path) as jar:
            return any("services/org.pytorch.serve." in name for name in jar.namelist())
    except (zipfile.BadZipFile, ValueError, NotImplementedError, ServeError):
        return False


def _kind_of_text(name: str, read: Callable[[], str]) -> Kind | None:
    """Return the kind by the lowercase name and the beginning of the text."""
    if name.endswith((".properties", ".cfg")) or name == "config.properties.template":
        return _kind_of_properties(name, read())
    if name.endswith(".xml"):
        text = read()
        return Kind.LOG4J if "<Configuration" in text and _LOGGERS.search(text) else None
    if re.search(r"dockerfile|containerfile", name) and not name.endswith((".md", ".sh", ".py")):
        return Kind.DOCKERFILE if re.search(r"(?mi)^FROM\s", read()) else None
    if name.endswith((".yaml", ".yml")):
        return Kind.YAML if _is_relevant_yaml(name, read()) else None
    if name.endswith((".sh", ".bash")) or ("." not in name[1:] and read()[:2] == "#!"):
        text = read()
        return Kind.SHELL if _SERVERS.search(text) or _WAITS.search(text) else None
    if re.fullmatch(r".*requirements.*\.(txt|in)", name):
        return Kind.REQUIREMENTS
    if name.endswith(".py"):
        return Kind.PYTHON if _IMPORTS.search(read()) else None
    return None


def _kind_of_properties(name: str, text: str) -> Kind | None:
    if re.search(r"(?m)^[ \t]*(?:log4j\.|appender\.|rootLogger)", text):
        return Kind.LOG4J if _LOGGERS.search(text) else None
    try:
        keys = parse_properties(text).keys()
    except ConfigError:
        return Kind.PROPERTIES if name.startswith("config") else None
    known = keys & (KEYS.keys() | WITHOUT_EFFECT.keys()) - {"version", "debug", "python", "models"}
    return Kind.PROPERTIES if known else None


def _is_relevant_yaml(name: str, text: str) -> bool:
    if _SERVERS.search(text) or re.search(r"(?m)^(?:ts_metrics|model_metrics|dag)\s*:", text):
        return True
    if re.search(r"serving\.kserve\.io|modelFormat|model[-_]config", f"{text} {name}"):
        return True
    if re.search(r"(?m)^[ \t]+(?:inference_address|management_address|model_store)\s*=", text):
        return True  # a file in a ConfigMap
    keys = re.findall(r"(?m)^(\w+)\s*:", text)
    return any(key in BY_KEY for key in keys)
