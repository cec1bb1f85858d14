"""`torch-model-archiver`: pack the files of a model and a manifest into one archive.

The archiver first plans all members, then writes them once from their original paths, without a
work directory or a second copy of the weights. It writes to a hidden temporary name in the target
directory and renames the complete file. A failed run leaves nothing, and simultaneous runs do not
conflict.

The manifest is the first member, the others follow sorted by name, without owners: the same files
give the same list of members.

Archives are flat: a file goes to the root by its base name, a directory by its contents. If two
files have the same name, the later one replaces the earlier one with a warning. ``--keep-tree``
(an addition to TorchServe) keeps the path of each extra entry relative to the current directory;
entries outside of it keep their base name. For the LSP runtime, a handler that is not built in is
a library: the name up to the colon, with ``.so`` appended if missing.
"""

import argparse
import importlib.metadata
import logging
import re
import sys
from datetime import datetime
from pathlib import Path

from marserve.backend.manifest import (
    MANIFEST_PATH,
    RUNTIMES,
    Manifest,
    ManifestError,
    check_addressable,
)
from marserve.tools.archiver.cast import accuracy, cast
from marserve.tools.archiver.config import ModelArchiverConfig
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
_FLATTENED = "its contents are at the root of the archive; --keep-tree keeps their paths."

logger = logging.getLogger(__name__)


class ModelArchiver:
    """TorchServe's Python entry point."""

    @staticmethod
    def generate_model_archive(config: object = None) -> Path:
        """Write an archive as the function `generate_model_archive` does."""
        return generate_model_archive(config)


class ArgParser:
    """TorchServe's parser of the command line."""

    @staticmethod
    def export_model_args_parser() -> ModelArchiverConfig:
        """Parse the command line of this process; exit with status 2 if it is wrong."""
        return ModelArchiverConfig.from_args(build_parser().parse_args())


def generate_model_archive(config: object = None) -> Path:
    """Write an archive and return its path; for ``no-archive`` that is a directory.

    Args:
        config: A `ModelArchiverConfig` or an object with such attributes; by default the command
            line of this process.

    Raises:
        ModelArchiverError: Bad name, runtime or format, or the archive exists or cannot be written.
        FileNotFoundError: A source file does not exist.
    """
    whole = ArgParser.export_model_args_parser() if config is None else config
    read = ModelArchiverConfig.of(whole)
    if read.precision is not None:
        target, report = generate_cast(read)
        logger.info("%s", report)
        return target
    return package_model(whole, manifest_of(read).to_json())


def generate_cast(config: ModelArchiverConfig) -> tuple[Path, str]:
    """Write an archive with cast weights; return its path and a report of sizes and accuracy."""
    if config.precision not in PRECISIONS:
        known = ", ".join(PRECISIONS)
        raise ModelArchiverError(f"Precision {config.precision} is none of {known}.")
    target = archive_path(config.export_path, config.model_name, config.archive_format).resolve()
    for original in (config.serialized_file, config.config_file):
        if original and Path(original).resolve().is_relative_to(target):
            raise ModelArchiverError(
                f"{original} would be overwritten with the output of --precision."
            )
    with cast(config) as packed:
        target = generate_model_archive(packed.config)
    return target, f"{packed.report}\n{accuracy(config, generate_model_archive)}\n"


def package_model(config: object, manifest: str) -> Path:
    """Write an archive with the given manifest and return its path.

    Args:
        config: A `ModelArchiverConfig` or an object with such attributes.
        manifest: The text of MANIFEST.json.

    Raises:
        ModelArchiverError: Bad name, runtime or format, or the archive exists or cannot be written.
        FileNotFoundError: A source file does not exist.
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
    """Return the parser of the command line; ``prog`` is the name that its help shows."""
    parser = argparse.ArgumentParser(prog=prog, description="Pack a model into one archive.")
    add = parser.add_argument
    add("--model-name", required=True, help="name of the model and of the archive")
    add("--serialized-file", help="weights: state dict, TorchScript, ONNX or any other file")
    add("--model-file", help="Python file with the model's class, for weights without code")
    add("--handler", required=True, help="built-in handler, or path of a Python file[:function]")
    extra = "more files, and directories, of which the contents go to the root; comma-separated"
    add("--extra-files", help=f"{extra}; wildcards allowed")
    add("--runtime", choices=RUNTIMES, default="python", help="runtime of the handler")
    add("--export-path", default=str(Path.cwd()), help="directory for the archive")
    add(
        "--archive-format",
        choices=ARCHIVE_FORMATS,
        default="default",
        help="compressed .mar, uncompressed .mar, .tar.gz, or a plain directory",
    )
    add("-f", "--force", action="store_true", help="overwrite an archive that exists")
    add("-v", "--version", required=True, help="version of the model, as in URLs")
    add("-r", "--requirements-file", help="pip requirements of this model alone")
    add("-c", "--config-file", help="YAML file with the model's settings")
    add("--keep-tree", action="store_true", help="extra files keep their paths in directories")
    add("--precision", choices=PRECISIONS, help="cast the weights, and serve the model in it")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
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
    """Check the name of a model or a workflow.

    Raises:
        ModelArchiverError: The name contains a character that is not allowed, or is too long.
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
    """Create the directory for archives if it does not exist.

    Raises:
        ModelArchiverError: The path exists and is not a directory.
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
    """Return the path of an archive in the given format."""
    return Path(export_path) / (model_name + ARCHIVE_SUFFIXES[archive_format])


def check_overwriting(target: Path, *, force: bool) -> None:
    """Check that an archive may be written to a path.

    Raises:
        ModelArchiverError: The path exists and ``force`` is not set.
    """
    if target.exists():
        if not force:
            raise ModelArchiverError(f"{target} already exists. Use --force/-f to overwrite it.")
        logger.warning("Overwriting %s ...", target)


def now() -> str:
    """Return the local time in the format of manifests."""
    return datetime.now().astimezone().strftime("%d/%m/%Y %H:%M:%S")


def manifest_of(config: ModelArchiverConfig) -> Manifest:
    """Return the manifest of an archive, with the current time."""

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


# Members --------------------------------------------------------------------------------------


def plan(config: ModelArchiverConfig) -> list[tuple[str, Path]]:
    """Return the members of an archive: name and source file of each.

    Raises:
        ModelArchiverError: A file and a directory have the same name in the archive.
        FileNotFoundError: A source file does not exist.
    """
    members = Members(MANIFEST_PATH)
    for path in (config.model_file, config.serialized_file, _handler_file(config)):
        if path:
            members.add(Path(path).name, Path(path))
    for entry in extra_entries(config.extra_files or ""):
        if entry.is_dir() and not config.keep_tree:
            logger.warning("%s: %s", entry, _FLATTENED)
        add_extra(members, entry, keep_tree=config.keep_tree)
    for path in (config.requirements_file, config.config_file):
        if path:
            members.add(Path(path).name, Path(path))
    return members.finished()


def _handler_file(config: ModelArchiverConfig) -> str | None:
    """Return the path of the handler's file; None for a built-in handler."""
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
