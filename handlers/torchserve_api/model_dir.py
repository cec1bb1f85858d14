"""Files for the tests of handlers: TorchServe's ``…unit_tests.test_utils.model_dir``."""

import os
import shutil
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlparse


def download_model(model_url: str, model_dir: Path) -> None:
    """Put a file from the web into a directory as ``model.pt``; it is fetched once only.

    Raises:
        OSError: It cannot be fetched or written.
    """
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    cached = caches / "marserve" / "models" / Path(urlparse(model_url).path).name
    if not cached.exists():
        cached.parent.mkdir(parents=True, exist_ok=True)
        part = cached.with_name(f".{cached.name}.{os.getpid()}.part")
        with urllib.request.urlopen(model_url) as source, part.open("wb") as file:  # noqa: S310 - the caller's URL
            shutil.copyfileobj(source, file)
        part.replace(cached)
    shutil.copy(cached, Path(model_dir, "model.pt"))


def copy_files(src_dir: Path, dst_dir: Path, files: Mapping[str, str]) -> None:
    """Copy files from one directory to another; from name there to name here."""
    for source, target in files.items():
        shutil.copyfile(Path(src_dir, source), Path(dst_dir, target))
