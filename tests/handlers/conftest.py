"""A model directory and a context, as a worker would make them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from marserve.backend.context import Context, RequestProcessor
from marserve.backend.metrics import MetricsStore


@pytest.fixture
def make_context(tmp_path: Path) -> Callable[..., Context]:
    """Make the context of a model in ``tmp_path``; keywords are entries of the manifest."""

    def make(*, yaml: Any = None, gpu: int | None = None, **manifest: str) -> Context:
        return Context(
            "kitten",
            str(tmp_path),
            {"model": {"modelName": "kitten", **manifest}},
            8,
            gpu,
            "1.0",
            metrics=MetricsStore(),
            model_yaml_config=yaml,
        )

    return make


@pytest.fixture
def begin_batch() -> Callable[..., Context]:
    """Give a context its requests, with the headers of each."""

    def begin(context: Context, *headers: dict[str, Any]) -> Context:
        context.request_ids = {i: f"id-{i}" for i in range(len(headers))}
        context.request_processor = [RequestProcessor(one) for one in headers]
        return context

    return begin
