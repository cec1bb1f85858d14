"""`torch-model-archiver`: a model's files → one archive with a manifest.

First everything is planned (which file goes where, under which name), then it is written once,
straight from where the files lie: no work directory, no second copy of the weights. The archive
grows under a hidden temporary name beside its place and is renamed when complete, so a run that
fails leaves nothing, and two runs at a time do not meet.

The manifest goes first, the other members follow sorted by name, owners are left out: the same
files give the same list every time.

Archives are flat: a file goes to the root by its base name, of a directory the contents do. Where
two files claim one name, the later wins, as it always did, but with a warning. ``--keep-tree``
(ours) keeps the path of every extra entry below the current directory instead; an entry from
elsewhere keeps its own name. For the LSP runtime a handler that is not built in is a library: the
name up to the colon, with ``.so`` where it is missing.
"""

import argparse
import contextlib
import functools
import glob
import importlib.metadata
import io
import logging
import os
import re
import shutil
import sys
import tarfile
import time
import uuid
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from datetime import datetime
from pathlib import Path

from marserve.backend.manifest import (
    MANIFEST_PATH,
    RUNTIMES,
    Manifest,
    ManifestError,
    check_addressable,
)

ARCHIVE_FORMATS = ("default", "zip-store", "tgz", "no-archive")
BUILT_IN_HANDLERS = (
    "base_handler",
    "text_classifier",
    "image_classifier",
    "object_detector",
    "image_segmenter",
    "dali_image_classifier",
    "vllm_handler",
    "trt_llm_handler",
)
BUILT_IN_LSP_HANDLERS = ("BaseHandler", "TorchScriptHandler")

__version__ = importlib.metadata.version("marserve")

_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_\-.]*")
_WILDCARD = re.compile(r"[*?[]")
ARCHIVE_SUFFIXES = {"default": ".mar", "zip-store": ".mar", "tgz": ".tar.gz", "no-archive": ""}
_LEFT_OUT_FOLDERS = ("__pycache__", "__MACOSX")

logger = logging.getLogger(__name__)


class ModelArchiverError(Exception):
    """An archive that cannot be made; the message says what to change."""


@dataclass
class ModelArchiverConfig:
    """What goes into an archive, and where it goes; the command line's options by the same names.

    Attributes:
        model_name: Name of the model and of the archive.
        handler: Built-in name, or path of a Python file, with or without ``.py`` and ``:function``.
        version: Any text that can be a segment of a path.
        serialized_file: Path of the weights.
        model_file: Path of the Python file with the model's class.
        extra_files: Comma-separated paths of files and directories, with wildcards.
        runtime: One of ``python``, ``python3``, ``LSP``.
        export_path: Directory for the archive.
        archive_format: One of `ARCHIVE_FORMATS`.
        force: Overwrite an archive that exists.
        requirements_file: Path of a pip requirements file.
        config_file: Path of the model's YAML file.
        keep_tree: Extra entries keep their directories instead of landing in the root.
    """

    model_name: str
    handler: str
    version: str
    serialized_file: str | None = None
    model_file: str | None = None
    extra_files: str | None = None
    runtime: str = "python"
    export_path: str = field(default_factory=lambda: str(Path.cwd()))
    archive_format: str = "default"
    force: bool = False
    requirements_file: str | None = None
    config_file: str | None = None
    keep_tree: bool = False

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> "ModelArchiverConfig":
        """The configuration in a parsed command line; what the namespace lacks is the default."""
        return cls.of(args)

    @classmethod
    def of(cls, options: object) -> "ModelArchiverConfig":
        """The configuration in any object's attributes; what it lacks is the default.

        Raises:
            TypeError: It lacks one that has no default.
        """
        if isinstance(options, cls):
            return options
        names = [each.name for each in fields(cls) if hasattr(options, each.name)]
        return cls(**{name: getattr(options, name) for name in names})


class ModelArchiver:
    """TorchServe's Python entry point."""

    @staticmethod
    def generate_model_archive(config: object = None) -> Path:
        """See `generate_model_archive`."""
        return generate_model_archive(config)


class ArgParser:
    """TorchServe's reader of the command line."""

    @staticmethod
    def export_model_args_parser() -> ModelArchiverConfig:
        """Reads the command line of this process; one that is wrong ends it, with status 2."""
        return ModelArchiverConfig.from_args(build_parser().parse_args())


def generate_model_archive(config: object = None) -> Path:
    """Writes an archive; the path of the file, or of the directory for ``no-archive``.

    Args:
        config: What goes where, a `ModelArchiverConfig` or an object like it; without it, what the
            command line of this process says.

    Raises:
        ModelArchiverError: Bad name, runtime or format, the archive exists, or cannot be written.
        FileNotFoundError: A file that should go in is not there.
    """
    whole = ArgParser.export_model_args_parser() if config is None else config
    return package_model(whole, manifest_of(ModelArchiverConfig.of(whole)).to_json())


def package_model(config: object, manifest: str) -> Path:
    """Writes an archive with a manifest of one's own; see `generate_model_archive`.

    Args:
        config: What goes where, a `ModelArchiverConfig` or an object like it.
        manifest: The text of MANIFEST.json.

    Raises:
        ModelArchiverError: Bad name, runtime or format, the archive exists, or cannot be written.
        FileNotFoundError: A file that should go in is not there.
    """
    config = ModelArchiverConfig.of(config)
    _check(config)
    content = _Content(config.model_name, manifest, plan(config))
    target = _prepare_target(config)
    logger.info("Writing the archive of model %s to %s", config.model_name, target)
    try:
        with _replacing(target) as part:
            _WRITERS[config.archive_format](part, content)
    except OSError as error:
        raise ModelArchiverError(
            f"Failed to save the model-archive to model-path {target}: {error}"
        ) from error
    return target


def build_parser(prog: str = "torch-model-archiver") -> argparse.ArgumentParser:
    """The command line's grammar; other commands reuse it under their own name."""
    parser = argparse.ArgumentParser(prog=prog, description="Pack a model into one archive.")
    add = parser.add_argument
    add("--model-name", required=True, help="name of the model and of the archive")
    add("--serialized-file", help="weights: state dict, TorchScript, ONNX or any other file")
    add("--model-file", help="Python file with the model's class, for weights without code")
    add("--handler", required=True, help="built-in handler, or path of a Python file[:function]")
    add("--extra-files", help="more files and directories, comma-separated; wildcards allowed")
    add("--runtime", choices=RUNTIMES, default="python", help="what runs the handler")
    add("--export-path", default=str(Path.cwd()), help="directory for the archive")
    add(
        "--archive-format",
        choices=ARCHIVE_FORMATS,
        default="default",
        help="compressed .mar, uncompressed .mar, .tar.gz, or a plain directory",
    )
    add("-f", "--force", action="store_true", help="overwrite an archive that exists")
    add("-v", "--version", required=True, help="version of the model, as it stands in a URL")
    add("-r", "--requirements-file", help="pip requirements of this model alone")
    add("-c", "--config-file", help="YAML file with the model's settings")
    add("--keep-tree", action="store_true", help="extra files keep their directories")
    return parser


def main(argv: list[str] | None = None) -> int:
    """The command; its exit status."""
    config = ModelArchiverConfig.from_args(build_parser().parse_args(argv))
    try:
        target = generate_model_archive(config)
    except (ModelArchiverError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"Successfully exported model {config.model_name} to {target}\n")
    return 0


# Checks ---------------------------------------------------------------------------------------


def check_name(model_name: str) -> None:
    """Checks the name of a model.

    Raises:
        ModelArchiverError: It has characters that no model's name may have, or is too long.
    """
    if not _MODEL_NAME.fullmatch(model_name):
        raise ModelArchiverError(
            "Model name contains special characters. "
            f"The allowed regular expression for a model name is ^{_MODEL_NAME.pattern}$"
        )
    _check_addressable("Model name", model_name)


def _check_addressable(what: str, text: str) -> None:
    try:
        check_addressable(what, text)
    except ManifestError as error:
        raise ModelArchiverError(str(error)) from error


def _check(config: ModelArchiverConfig) -> None:
    check_name(config.model_name)
    if not config.version.isprintable():
        raise ModelArchiverError("Model version must be printable.")
    _check_addressable("Model version", config.version)
    if config.runtime not in RUNTIMES:
        raise ModelArchiverError(f"Runtime {config.runtime} is none of {', '.join(RUNTIMES)}.")
    if config.archive_format not in ARCHIVE_FORMATS:
        formats = ", ".join(ARCHIVE_FORMATS)
        raise ModelArchiverError(f"Archive format {config.archive_format} is none of {formats}.")


def _prepare_target(config: ModelArchiverConfig) -> Path:
    """Where the archive goes, once it may go there."""
    make_export_path(config.export_path)
    target = archive_path(config.export_path, config.model_name, config.archive_format)
    check_overwriting(target, force=config.force)
    return target


def make_export_path(export_path: str) -> None:
    """Makes the directory for archives where there is none.

    Raises:
        ModelArchiverError: It is something else than a directory.
    """
    folder = Path(export_path)
    if folder.exists() and not folder.is_dir():
        raise ModelArchiverError(
            f"Given export-path {folder} is not a directory. Name a directory for the archive."
        )
    if not folder.exists():
        logger.warning("Creating the export-path %s, which does not exist.", folder)
        folder.mkdir(parents=True)


def archive_path(export_path: str, model_name: str, archive_format: str) -> Path:
    """Where an archive of that format goes."""
    return Path(export_path) / (model_name + ARCHIVE_SUFFIXES[archive_format])


def check_overwriting(target: Path, *, force: bool) -> None:
    """Checks that an archive may be written there.

    Raises:
        ModelArchiverError: There is one already, and it is not to be overwritten.
    """
    if target.exists():
        if not force:
            raise ModelArchiverError(f"{target} already exists. Use --force/-f to overwrite it.")
        logger.warning("Overwriting %s ...", target)


def manifest_of(config: ModelArchiverConfig) -> Manifest:
    """The manifest of an archive that is written now."""

    def base_name(path: str | None) -> str:
        return Path(path or "").name

    return Manifest(
        created_on=datetime.now().astimezone().strftime("%d/%m/%Y %H:%M:%S"),
        runtime=config.runtime,
        model_name=config.model_name,
        serialized_file=base_name(config.serialized_file),
        handler=config.handler.rpartition("/")[2],
        model_file=base_name(config.model_file),
        model_version=config.version,
        requirements_file=base_name(config.requirements_file),
        config_file=base_name(config.config_file),
        archiver_version=__version__,
    )


# What goes in ---------------------------------------------------------------------------------


class _Members:
    """Names in the archive and the files that go there."""

    def __init__(self) -> None:
        self._sources: dict[str, Path] = {}

    def add(self, name: str, source: Path) -> None:
        """Plans a file; of two with one name the later wins."""
        if not source.is_file():
            raise FileNotFoundError(f"File does not exist: {source}")
        rival = self._sources.get(name)
        if rival is not None and not rival.samefile(source):
            logger.warning(
                "%s replaces %s: both are called %s in the archive.", source, rival, name
            )
        self._sources[name] = source

    def finished(self) -> list[tuple[str, Path]]:
        """All files in the order of their names; the manifest's place is kept free."""
        if self._sources.pop(MANIFEST_PATH, None) is not None:
            logger.warning("The %s among the extra files gives way to a new one.", MANIFEST_PATH)
        for name in self._sources:
            for folder in Path(name).parents:
                if folder.as_posix() in self._sources:
                    raise ModelArchiverError(
                        f"{self._sources[folder.as_posix()]} and the directory of "
                        f"{self._sources[name]} are both called {folder} in the archive."
                    )
        return sorted(self._sources.items())


@dataclass(frozen=True)
class _Content:
    """All that an archive will hold; the manifest goes first, then the members as they stand."""

    model_name: str
    manifest: str
    members: list[tuple[str, Path]]


def plan(config: ModelArchiverConfig) -> list[tuple[str, Path]]:
    """What goes into an archive: names there, and the files that lie here.

    Raises:
        ModelArchiverError: Two of them cannot be there together.
        FileNotFoundError: A file is not there.
    """
    members = _Members()
    for path in (config.model_file, config.serialized_file, _handler_file(config)):
        if path:
            members.add(Path(path).name, Path(path))
    for entry in _extra_entries(config.extra_files or ""):
        _add_extra(members, entry, keep_tree=config.keep_tree)
    for path in (config.requirements_file, config.config_file):
        if path:
            members.add(Path(path).name, Path(path))
    return members.finished()


def _handler_file(config: ModelArchiverConfig) -> str | None:
    """Path of the handler's file; None where the handler is built in."""
    folder, slash, last = config.handler.rpartition("/")
    name = last.partition(":")[0]
    if config.runtime == "LSP":
        library = folder + slash + name.removesuffix(".so") + ".so"
        return None if config.handler in BUILT_IN_LSP_HANDLERS else library
    if config.handler in BUILT_IN_HANDLERS:
        return None
    return folder + slash + (name if ".py" in name else f"{name}.py")


def _extra_entries(extra_files: str) -> Iterator[Path]:
    """The files and directories meant by a comma-separated list."""
    for entry in filter(None, map(str.strip, extra_files.split(","))):
        if Path(entry).exists() or not _WILDCARD.search(entry):
            yield Path(entry)
            continue
        found = sorted(glob.glob(entry))  # noqa: PTH207 # Path.glob takes no absolute patterns
        if not found:
            logger.warning("No file matches the wildcard %s.", entry)
        yield from map(Path, found)


def _add_extra(members: _Members, entry: Path, *, keep_tree: bool) -> None:
    prefix = _kept_path(entry) if keep_tree else Path()
    if entry.is_dir():
        for path in _files_in(entry, frozenset()):
            members.add((prefix / path.relative_to(entry)).as_posix(), path)
    else:
        members.add(prefix.as_posix() if keep_tree else entry.name, entry)


def _kept_path(entry: Path) -> Path:
    """Where an entry lies below the current directory; one from elsewhere keeps its name."""
    here, path = Path.cwd(), Path(os.path.abspath(entry))  # noqa: PTH100 # links keep their place
    return path.relative_to(here) if path.is_relative_to(here) else Path(path.name)


def _files_in(folder: Path, above: frozenset[Path]) -> Iterator[Path]:
    """All files below a directory; links are followed, unless in a circle."""
    if folder.resolve() in above:
        raise ModelArchiverError(f"{folder} is a link to a directory that it lies in.")
    for path in folder.iterdir():
        if not path.is_dir():
            yield path
        elif not path.name.startswith(".") and path.name not in _LEFT_OUT_FOLDERS:
            yield from _files_in(path, above | {folder.resolve()})


# How it is written ----------------------------------------------------------------------------


@contextlib.contextmanager
def _replacing(target: Path) -> Iterator[Path]:
    """A temporary path that takes the target's place at the end, or vanishes on failure."""
    part = target.with_name(f".{uuid.uuid4().hex}.part")
    try:
        yield part
        if target.is_dir() and part.is_dir():
            _move_files(part, target)
        else:
            part.replace(target)
    finally:
        if part.is_dir():
            shutil.rmtree(part)
        else:
            part.unlink(missing_ok=True)


def _move_files(source: Path, target: Path) -> None:
    """Moves every file to its place in an existing directory; other files there stay."""
    for path in source.rglob("*"):
        if path.is_file():
            place = target / path.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            path.replace(place)


def _write_zip(part: Path, content: _Content, compression: int) -> None:
    with zipfile.ZipFile(part, "x", compression, strict_timestamps=False) as archive:
        info = zipfile.ZipInfo(MANIFEST_PATH, time.localtime()[:6])
        info.external_attr = 0o644 << 16
        archive.writestr(info, content.manifest, compression)
        for name, source in content.members:
            archive.write(source, name)


def _write_tgz(part: Path, content: _Content) -> None:
    data = content.manifest.encode()
    with tarfile.open(part, "x:gz") as archive:
        info = _tar_info(content, MANIFEST_PATH, len(data), time.time())
        archive.addfile(info, io.BytesIO(data))
        for name, source in content.members:
            state = source.stat()
            with source.open("rb") as file:
                archive.addfile(_tar_info(content, name, state.st_size, state.st_mtime), file)


def _tar_info(content: _Content, name: str, size: int, modified: float) -> tarfile.TarInfo:
    """A plain file without owner; tarfile's own would write hard links for files with two names."""
    info = tarfile.TarInfo(f"{content.model_name}/{name}")
    info.size, info.mtime = size, int(modified)
    return info


def _write_directory(part: Path, content: _Content) -> None:
    manifest = part / MANIFEST_PATH
    manifest.parent.mkdir(parents=True)
    manifest.write_text(content.manifest, encoding="utf-8")
    for name, source in content.members:
        place = part / name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, place)


_WRITERS: dict[str, Callable[[Path, _Content], None]] = {
    "default": functools.partial(_write_zip, compression=zipfile.ZIP_DEFLATED),
    "zip-store": functools.partial(_write_zip, compression=zipfile.ZIP_STORED),
    "tgz": _write_tgz,
    "no-archive": _write_directory,
}

if __name__ == "__main__":
    sys.exit(main())
