"""The configurations of the archivers: what a command line contains."""

import argparse
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Self


@dataclass
class ArchiverConfig:
    """Base of the configurations of both archivers."""

    @classmethod
    def of(cls, options: object) -> Self:
        """Return a configuration from the attributes of an object, with defaults for missing ones.

        Raises:
            TypeError: A required attribute is missing.
        """
        if isinstance(options, cls):
            return options
        names = [each.name for each in fields(cls) if hasattr(options, each.name)]
        return cls(**{name: getattr(options, name) for name in names})


@dataclass
class ModelArchiverConfig(ArchiverConfig):
    """The content and the path of an archive. Attributes are named as the options.

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
        keep_tree: Whether extra entries keep their directories.
        precision: Type that the weights are cast to, ``bf16`` or ``fp16`` (`cast`).
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
        """Return the configuration of a parsed command line, with defaults for missing options."""
        return cls.of(args)
