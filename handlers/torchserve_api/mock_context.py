"""For tests of handlers: a context without a server, and files of models."""

import os
import shutil
import urllib.request
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch

from marserve.backend.context import Context, RequestProcessor
from marserve.backend.metrics import MetricsStore
from marserve.handlers.torchserve_api.completed_context import EndlessRequests
from marserve.handlers.utils import get_yaml_config


class MockContext(Context):
    """The context of a model in a directory, with a request for each index that is read.

    ``gpu_id`` is ignored without a GPU. Setting `explain` requests an explanation.
    """

    def __init__(
        self,
        model_pt_file: str | None = "model.pt",
        model_dir: str | Path = "ts/torch_handler/unit_tests/models/tmp",
        model_file: str | None = "model.py",
        gpu_id: str | int | None = "0",
        model_name: str = "mnist",
        model_yaml_config_file: str | None = None,
        requests: int = 1,
    ) -> None:
        model = {"serializedFile": model_pt_file, "modelFile": model_file}
        has_gpu = torch.cuda.is_available() and gpu_id not in (None, "")
        yaml = model_yaml_config_file
        super().__init__(
            model_name,
            str(model_dir),
            {"model": {key: name for key, name in model.items() if name}},
            1,
            int(gpu_id or 0) if has_gpu else None,
            "1.0",
            metrics=MetricsStore(),
            model_yaml_config=get_yaml_config(Path(model_dir, yaml)) if yaml else None,
        )
        self.explain = False
        self.request_ids = {index: str(uuid.uuid4()) for index in range(requests)}
        self.request_processor = EndlessRequests(RequestProcessor({}) for _ in range(requests))

    def get_request_id(self, idx: int = 0) -> str | None:
        """Return the id of a request; create a missing one."""
        return (self.request_ids or {}).setdefault(idx, str(uuid.uuid4()))

    def get_request_header(self, idx: int, key: str) -> Any:
        """Return a header of a request; ``explain`` is ``True`` while `explain` is set."""
        if key == "explain":
            return "True" if self.explain else None
        return super().get_request_header(idx, key)


def download_model(model_url: str, model_dir: Path) -> None:
    """Copy a file from the web to ``model.pt`` in a directory; it is downloaded once."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    cached = caches / "marserve" / "models" / Path(urlparse(model_url).path).name
    if not cached.exists():
        cached.parent.mkdir(parents=True, exist_ok=True)
        part = cached.with_name(f".{cached.name}.{os.getpid()}.part")
        urllib.request.urlretrieve(model_url, part)  # noqa: S310 - the caller's URL
        part.replace(cached)
    shutil.copy(cached, Path(model_dir, "model.pt"))


def copy_files(src_dir: Path, dst_dir: Path, files: Mapping[str, str]) -> None:
    """Copy files to another directory; ``files`` maps old names to new names."""
    for source, target in files.items():
        shutil.copyfile(Path(src_dir, source), Path(dst_dir, target))
