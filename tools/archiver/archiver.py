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
import importlib.metadata
import logging
import re
import sys
from dataclasses import dataclass, field, fields
from datetime import datetime
from pathlib import Path
from typing import Self

from marserve.backend.manifest import (
    MANIFEST_PATH,
    RUNTIMES,
    Manifest,
    ManifestError,
    check_addressable,
)
from marserve.tools.archiver.members import (
    Members,
    ModelArchiverError,
    add_extra,
    extra_entries,
)
from marserve.tools.archiver.writers import WRITERS, Content, replacing

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
PRECISIONS = ("bf16", "fp16")
BUILT_IN_LSP_HANDLERS = ("BaseHandler", "TorchScriptHandler")

__version__ = importlib.metadata.version("marserve")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_\-.]*")
ARCHIVE_SUFFIXES = {"default": ".mar", "zip-store": ".mar", "tgz": ".tar.gz", "no-archive": ""}

logger = logging.getLogger(__name__)


@dataclass
class ArchiverConfig:
    """What a configuration of either archiver can do."""

    @classmethod
    def of(cls, options: object) -> Self:
        """The configuration in any object's attributes; what it lacks is the default.

        Raises:
            TypeError: It lacks one that has no default.
        """
        if isinstance(options, cls):
            return options
        names = [each.name for each in fields(cls) if hasattr(options, each.name)]
        return cls(**{name: getattr(options, name) for name in names})


@dataclass
class ModelArchiverConfig(ArchiverConfig):
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
        precision: What the weights are cast to, ``bf16`` or ``fp16``; see `cast`.
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
    precision: str | None = None

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> "ModelArchiverConfig":
        """The configuration in a parsed command line; what the namespace lacks is the default."""
        return cls.of(args)


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
    read = ModelArchiverConfig.of(whole)
    if read.precision is not None:
        target, report = generate_cast(read)
        logger.info("%s", report)
        return target
    return package_model(whole, manifest_of(read).to_json())


def generate_cast(config: ModelArchiverConfig) -> tuple[Path, str]:
    """Writes an archive with its weights in another precision; its path, and what that did."""
    from marserve.tools.archiver.cast import accuracy, cast  # torch is loaded for nothing else

    if config.precision not in PRECISIONS:
        known = ", ".join(PRECISIONS)
        raise ModelArchiverError(f"Precision {config.precision} is none of {known}.")
    target = archive_path(config.export_path, config.model_name, config.archive_format).resolve()
    for original in (config.serialized_file, config.config_file):
        if original and Path(original).resolve().is_relative_to(target):
            raise ModelArchiverError(
                f"{original} would be replaced by what --precision makes of it."
            )
    with cast(config) as packed:
        target = generate_model_archive(packed.config)
    return target, f"{packed.report}\n{accuracy(config, generate_model_archive)}\n"


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
    content = Content(config.model_name, MANIFEST_PATH, manifest, plan(config))
    target = _prepare_target(config)
    logger.info("Writing the archive of model %s to %s", config.model_name, target)
    try:
        with replacing(target) as part:
            WRITERS[config.archive_format](part, content)
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
    add("--precision", choices=PRECISIONS, help="cast the weights, and serve the model in it")
    return parser


def main(argv: list[str] | None = None) -> int:
    """The command; its exit status."""
    config = ModelArchiverConfig.from_args(build_parser().parse_args(argv))
    report = ""
    try:
        if config.precision is not None:
            target, report = generate_cast(config)
        else:
            target = generate_model_archive(config)
    except (ModelArchiverError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{report}Successfully exported model {config.model_name} to {target}\n")
    return 0


# Checks ---------------------------------------------------------------------------------------


def check_name(name: str, kind: str = "model") -> None:
    """Checks the name of a model, or of a workflow.

    Raises:
        ModelArchiverError: It has characters that no such name may have, or is too long.
    """
    if not _NAME.fullmatch(name):
        raise ModelArchiverError(
            f"{kind.capitalize()} name contains special characters. "
            f"The allowed regular expression for a {kind} name is ^{_NAME.pattern}$"
        )
    _check_addressable(f"{kind.capitalize()} name", name)


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


def now() -> str:
    """The local time, as manifests have it."""
    return datetime.now().astimezone().strftime("%d/%m/%Y %H:%M:%S")


def manifest_of(config: ModelArchiverConfig) -> Manifest:
    """The manifest of an archive that is written now."""

    def base_name(path: str | None) -> str:
        return Path(path or "").name

    return Manifest(
        created_on=now(),
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


def plan(config: ModelArchiverConfig) -> list[tuple[str, Path]]:
    """What goes into an archive: names there, and the files that lie here.

    Raises:
        ModelArchiverError: Two of them cannot be there together.
        FileNotFoundError: A file is not there.
    """
    members = Members(MANIFEST_PATH)
    for path in (config.model_file, config.serialized_file, _handler_file(config)):
        if path:
            members.add(Path(path).name, Path(path))
    for entry in extra_entries(config.extra_files or ""):
        add_extra(members, entry, keep_tree=config.keep_tree)
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


if __name__ == "__main__":
    sys.exit(main())
