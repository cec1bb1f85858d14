"""TorchServe's ``model_archiver.model_packaging`` and ``model_packaging_utils``.

Other projects pack their models with two calls, with a parsed command line as the argument:

    package_model(args, manifest=ModelExportUtils.generate_manifest_json(args))

The other functions are the single steps. `archiver` writes archives without an intermediate folder.
"""

import glob  # noqa: F401 - patched by tests of other projects
import logging  # noqa: F401 - patched by tests of other projects
import os  # noqa: F401 - patched by tests of other projects
import re  # noqa: F401 - patched by tests of other projects
import shutil
import sys
import tarfile  # noqa: F401 - patched by tests of other projects
import tempfile
import zipfile  # noqa: F401 - patched by tests of other projects
from collections.abc import Container, Iterable
from io import BytesIO  # noqa: F401 - likewise
from pathlib import Path
from typing import Any

from marserve.backend.manifest import MANIFEST_PATH
from marserve.tools.archiver import archiver
from marserve.tools.archiver.archiver import (
    ARCHIVE_SUFFIXES,
    BUILT_IN_HANDLERS,
    ArgParser,
    ModelArchiver,
    generate_model_archive,
    package_model,
)
from marserve.tools.archiver.config import ModelArchiverConfig
from marserve.tools.archiver.manifest_components import Manifest, Model, RuntimeType
from marserve.tools.archiver.members import ModelArchiverError

__all__ = [
    "ArgParser",
    "Manifest",
    "Model",
    "ModelArchiver",
    "ModelArchiverConfig",
    "ModelArchiverError",
    "ModelExportUtils",
    "RuntimeType",
    "archiving_options",
    "generate_model_archive",
    "model_handlers",
    "package_model",
]

MODEL_SERVER_VERSION = MODEL_ARCHIVE_VERSION = "1.0"
MAR_INF, MANIFEST_FILE_NAME = MANIFEST_PATH.split("/")

archiving_options = dict(ARCHIVE_SUFFIXES)
"""The suffix of an archive's name for each format."""

model_handlers = dict.fromkeys(BUILT_IN_HANDLERS, "")
"""The names of the built-in handlers; TorchServe has a kind for each."""


class ModelExportUtils:
    """The steps. ``config`` is a `ModelArchiverConfig` or an object with such attributes."""

    @staticmethod
    def generate_model(config: Any) -> Model:
        """Return the model section of the manifest."""
        config = ModelArchiverConfig.of(config)
        return Model(
            config.model_name,
            config.serialized_file,
            config.handler,
            config.model_file,
            config.version,
            requirements_file=config.requirements_file,
            config_file=config.config_file,
        )

    @staticmethod
    def generate_manifest_json(config: Any) -> str:
        """Return the text of the manifest.

        Raises:
            ValueError: The runtime is unknown.
        """
        runtime = ModelArchiverConfig.of(config).runtime
        return str(Manifest(runtime, ModelExportUtils.generate_model(config)))

    @staticmethod
    def validate_inputs(model_name: str, export_path: str) -> None:
        """Check the name of a model, and create the directory for archives if it is missing.

        Raises:
            ModelArchiverError: The name is not allowed, or the path is not a directory.
        """
        archiver.check_name(model_name)
        archiver.make_export_path(export_path)

    @staticmethod
    def check_model_name_regex_or_exit(model_name: str) -> None:
        """Check the name of a model.

        Raises:
            ModelArchiverError: The name is not allowed.
        """
        archiver.check_name(model_name)

    @staticmethod
    def get_archive_export_path(export_file_path: str, model_name: str, archive_format: str) -> str:
        """Return the path of an archive in the given format."""
        return str(archiver.archive_path(export_file_path, model_name, archive_format))

    @staticmethod
    def check_mar_already_exists(
        model_name: str,
        export_file_path: str | None,
        overwrite: bool,
        archive_format: str = "default",
    ) -> str:
        """Return the directory for the archive, by default the working directory.

        Raises:
            ModelArchiverError: The archive exists and ``overwrite`` is not set.
        """
        folder = str(Path.cwd()) if export_file_path is None else export_file_path
        target = archiver.archive_path(folder, model_name, archive_format)
        archiver.check_overwriting(target, force=overwrite)
        return folder

    @staticmethod
    def copy_artifacts(model_name: str, runtime: str, **files: str | None) -> str:
        """Copy all members of an archive into a new folder, and return its path.

        Args:
            model_name: Name of the model.
            runtime: Runtime of the handler.
            files: ``model_file``, ``serialized_file``, ``handler``, ``extra_files``,
                ``requirements_file`` and ``config_file``.

        Raises:
            FileNotFoundError: A source file does not exist.
        """
        options: dict[str, Any] = {key.replace("-", "_"): path for key, path in files.items()}
        options = {"handler": BUILT_IN_HANDLERS[0], "version": "", **options}
        config = ModelArchiverConfig(**options, model_name=model_name, runtime=runtime)
        folder = Path(tempfile.mkdtemp(prefix=f"{model_name}-"))
        for name, source in archiver.plan(config):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, folder / name)
        return str(folder)

    @staticmethod
    def archive(
        export_file: str,
        model_name: str,
        model_path: str,
        manifest: str,
        archive_format: str = "default",
    ) -> None:
        """Write the archive of a folder.

        Args:
            export_file: Directory for the archive.
            model_name: Name of the model.
            model_path: The folder.
            manifest: The text of MANIFEST.json.
            archive_format: One of `archiving_options`.

        Raises:
            ModelArchiverError: The archive cannot be written.
        """
        config = ModelArchiverConfig(
            model_name=model_name,
            handler=BUILT_IN_HANDLERS[0],
            version="",
            extra_files=model_path,
            export_path=export_file,
            archive_format=archive_format,
            force=True,
        )
        package_model(config, manifest)

    @staticmethod
    def make_dir(d: str) -> None:
        """Create a directory if it does not exist."""
        Path(d).mkdir(parents=True, exist_ok=True)

    @staticmethod
    def find_unique(files: Iterable[str], suffix: str) -> str | None:
        """Return the file with the given suffix, or None.

        Raises:
            ModelArchiverError: Several files have the suffix.
        """
        found = [file for file in files if file.endswith(suffix)]
        if len(found) > 1:
            raise ModelArchiverError(f"Only one {suffix} file is expected, not {found}.")
        return found[0] if found else None

    @staticmethod
    def clean_temp_files(temp_files: Iterable[str]) -> None:
        """Remove files.

        Raises:
            OSError: A file is missing or cannot be removed.
        """
        for file in temp_files:
            Path(file).unlink()

    @staticmethod
    def directory_filter(directory: str, unwanted_dirs: Container[str]) -> bool:
        """Return whether a directory is packed: neither unwanted nor hidden."""
        return directory not in unwanted_dirs and not directory.startswith(".")

    @staticmethod
    def file_filter(current_file: str, files_to_exclude: Container[str]) -> bool:
        """Return whether a file is packed beside a new manifest."""
        unwanted = current_file in files_to_exclude or current_file == "MANIFEST.json"
        return not unwanted and not current_file.endswith((".pyc", ".DS_Store", ".mar"))


if __name__ == "__main__":
    sys.exit(archiver.main())
