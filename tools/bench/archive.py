"""The archive that a model is registered from, unchanged or with another precision.

The precision is a key of the archive's model-config.yaml; a registration cannot change it. The
archive is therefore unpacked once, and each precision gets a directory of links to its files with
a model-config.yaml that has this precision.
"""

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml

from marserve.backend.manifest import MANIFEST_PATH, Manifest, ManifestError
from marserve.frontend.archives.unpack import ArchiveLimits, unpack
from marserve.frontend.errors import ServeError
from marserve.tools.bench.errors import BenchError

_SECTION = "optimization"
_CONFIG_FILE = "model-config.yaml"


class ArchiveVariants:
    """Variants of an archive with other precisions; they exist until `close`.

    Args:
        url: The archive's URL, as a registration takes it.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._directory: Path | None = None

    def close(self) -> None:
        """Remove the variants."""
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    def url_for(self, precision: str | None) -> str:
        """Return the URL to register for a precision; None selects the unchanged archive.

        Raises:
            BenchError: The archive cannot be read on this machine.
        """
        if precision is None:
            return self._url
        directory = self._unpacked() / precision
        if not directory.exists():
            self._write(directory, precision)
        return str(directory)

    def _unpacked(self) -> Path:
        if self._directory is None:
            self._directory = Path(tempfile.mkdtemp(prefix="marserve-bench-"))
            original = _local_path(self._url)
            if original.is_dir():
                (self._directory / "original").symlink_to(original)
            else:
                _unpack(original, self._directory / "original")
        return self._directory

    def _write(self, directory: Path, precision: str) -> None:
        original = directory.with_name("original").resolve()
        shutil.copytree(original, directory, copy_function=os.symlink)
        manifest = _manifest(original)
        name = manifest.config_file or _CONFIG_FILE
        config = _config(original / name)
        section = config.get(_SECTION)
        config[_SECTION] = {
            **(section if isinstance(section, dict) else {}),
            "precision": precision,
        }
        _replace(directory / name, yaml.safe_dump(config))
        if not manifest.config_file:
            raw: dict[str, Any] = json.loads(json.dumps(manifest.raw))
            raw["model"]["configFile"] = name
            _replace(directory / MANIFEST_PATH, json.dumps(raw))


def _local_path(url: str) -> Path:
    parts = urlsplit(url)
    path = Path(unquote(parts.path) if parts.scheme == "file" else url)
    if not path.exists():
        raise BenchError(
            f"To sweep over precision, bench has to write it into the archive, but {url} does not "
            "exist on this machine: give --register the path of the archive, or a file:// URL."
        )
    return path.resolve()


def _unpack(archive: Path, directory: Path) -> None:
    try:
        unpack(archive, directory, ArchiveLimits())
    except ServeError as error:
        raise BenchError(f"The archive {archive} cannot be read: {error}") from None


def _manifest(directory: Path) -> Manifest:
    try:
        manifest = Manifest.read(directory)
    except ManifestError as error:
        raise BenchError(f"The archive's manifest cannot be read: {error}") from None
    if manifest is None:
        raise BenchError("The archive has no manifest.")
    return manifest


def _config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except Exception:  # noqa: BLE001 - PyYAML raises many kinds
        config = None
    if not isinstance(config, dict):
        raise BenchError(f"The archive's {path.name} is not a YAML mapping.")
    return config


def _replace(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)  # a link to a file of the original archive
    path.write_text(text, encoding="utf-8")
