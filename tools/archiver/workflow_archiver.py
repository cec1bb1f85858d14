"""`torch-workflow-archiver`: pack the specification and handler of a workflow into one archive.

The archive is planned, then written once, under a temporary name, as in `archiver`. Additions to
TorchServe: a workflow of models only needs no handler (TorchServe's crashed), a missing file is
reported in a sentence, and extra files may be directories and contain wildcards.
"""

import argparse
import logging
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from marserve.backend.manifest import WORKFLOW_MANIFEST_PATH, WorkflowManifest
from marserve.tools.archiver.archiver import (
    __version__,
    check_name,
    check_overwriting,
    now,
)
from marserve.tools.archiver.config import ArchiverConfig
from marserve.tools.archiver.members import (
    Members,
    ModelArchiverError,
    add_extra,
    extra_entries,
)
from marserve.tools.archiver.writers import WRITERS, Content, replacing

__all__ = [
    "ArgParser",
    "WorkflowArchiverConfig",
    "WorkflowArchiverError",
    "WorkflowExportUtils",
    "__version__",
    "generate_workflow_archive",
    "package_workflow",
]

logger = logging.getLogger(__name__)


class WorkflowArchiverError(Exception):
    """An archive that cannot be written; the message contains what to change."""


@dataclass
class WorkflowArchiverConfig(ArchiverConfig):
    """The content and the path of an archive. Attributes are named as the options.

    Attributes:
        workflow_name: Name of the workflow and of the archive.
        spec_file: Path of the YAML file with the nodes.
        handler: Path of the Python file with the functions among the nodes.
        extra_files: Comma-separated paths of files and directories, with wildcards.
        export_path: Directory for the archive.
        force: Overwrite an archive that exists.
    """

    workflow_name: str
    spec_file: str
    handler: str | None = None
    extra_files: str | None = None
    export_path: str = field(default_factory=lambda: str(Path.cwd()))
    force: bool = False


class ArgParser:
    """TorchServe's parser of the command line."""

    @staticmethod
    def workflow_archiver_args_parser() -> argparse.ArgumentParser:
        """Return the parser of the command line."""
        parser = argparse.ArgumentParser(
            prog="torch-workflow-archiver", description="Pack a workflow into one archive."
        )
        add = parser.add_argument
        add("--workflow-name", required=True, help="name of the workflow and of the archive")
        add("--spec-file", required=True, help="YAML file with the nodes and their edges")
        add("--handler", help="Python file with the functions among the nodes")
        add("--extra-files", help="more files and directories, comma-separated; wildcards allowed")
        add("--export-path", default=str(Path.cwd()), help="directory for the archive")
        add("-f", "--force", action="store_true", help="overwrite an archive that exists")
        return parser


class WorkflowExportUtils:
    """TorchServe's steps. ``args`` is a parsed command line or an object with such attributes."""

    @staticmethod
    def generate_manifest_json(args: Any) -> str:
        """Return the text of the manifest."""
        config = WorkflowArchiverConfig.of(args)
        manifest = WorkflowManifest(
            workflow_name=config.workflow_name,
            specification_file=Path(config.spec_file).name,
            handler=Path(config.handler or "").name,
            archiver_version=__version__,
            created_on=now(),
        )
        return manifest.to_json()

    @staticmethod
    def validate_inputs(workflow_name: str, export_path: str) -> None:
        """Check the name of a workflow, and that the directory for archives exists.

        Raises:
            WorkflowArchiverError: The name is not allowed, or the path is not a directory.
        """
        try:
            check_name(workflow_name, "workflow")
        except ModelArchiverError as error:
            raise WorkflowArchiverError(str(error)) from error
        if not Path(export_path).is_dir():
            raise WorkflowArchiverError(
                f"Given export-path {export_path} is not a directory. "
                "Point to a valid export-path directory."
            )

    @staticmethod
    def get_archive_export_path(export_file_path: str, workflow_name: str) -> str:
        """Return the path of an archive."""
        return str(Path(export_file_path) / f"{workflow_name}.war")


def package_workflow(args: Any, manifest: str) -> Path:
    """Write an archive with the given manifest and return its path.

    Args:
        args: A `WorkflowArchiverConfig` or an object with such attributes.
        manifest: The text of MANIFEST.json.

    Raises:
        WorkflowArchiverError: Bad name or directory, or the archive exists or cannot be written.
        FileNotFoundError: A source file does not exist.
    """
    config = WorkflowArchiverConfig.of(args)
    WorkflowExportUtils.validate_inputs(config.workflow_name, config.export_path)
    target = Path(
        WorkflowExportUtils.get_archive_export_path(config.export_path, config.workflow_name)
    )
    try:
        members = _plan(config)
        content = Content(config.workflow_name, WORKFLOW_MANIFEST_PATH, manifest, members)
        check_overwriting(target, force=config.force)
    except ModelArchiverError as error:
        raise WorkflowArchiverError(str(error)) from error
    logger.info("Writing the archive of workflow %s to %s", config.workflow_name, target)
    try:
        with replacing(target) as part:
            WRITERS["default"](part, content)
    except OSError as error:
        raise WorkflowArchiverError(
            f"Failed to save the workflow-archive to workflow-path {target}: {error}"
        ) from error
    return target


def generate_workflow_archive(config: object = None) -> Path:
    """Write an archive and return its path.

    Args:
        config: A `WorkflowArchiverConfig` or an object with such attributes; by default the command
            line of this process.

    Raises:
        WorkflowArchiverError, FileNotFoundError: As in `package_workflow`.
    """
    args = ArgParser.workflow_archiver_args_parser().parse_args() if config is None else config
    return package_workflow(args, WorkflowExportUtils.generate_manifest_json(args))


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    args = ArgParser.workflow_archiver_args_parser().parse_args(argv)
    try:
        target = generate_workflow_archive(args)
    except (WorkflowArchiverError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"Successfully exported workflow {args.workflow_name} to {target}\n")
    return 0


def _plan(config: WorkflowArchiverConfig) -> list[tuple[str, Path]]:
    members = Members(WORKFLOW_MANIFEST_PATH)
    for path in (config.spec_file, config.handler):
        if path:
            members.add(Path(path).name, Path(path))
    for entry in extra_entries(config.extra_files or ""):
        add_extra(members, entry, keep_tree=False)
    return members.finished()


if __name__ == "__main__":
    sys.exit(main())
