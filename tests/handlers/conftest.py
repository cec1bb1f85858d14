"""A model directory and a context, as a worker would make them."""

import json
import sys

import pytest
import torch
from nets import MODEL

from marserve.backend.context import Context, RequestProcessor
from marserve.backend.loader import load_service
from marserve.backend.metrics import MetricsStore
from marserve.backend.protocol import Load


@pytest.fixture
def make_context(tmp_path):
    """Make the context of a model in ``tmp_path``; keywords are entries of the manifest."""

    def make(*, yaml=None, gpu=None, **manifest):
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
def begin_batch():
    """Set the requests of a context, with the headers of each."""

    def begin(context, *headers):
        context.request_ids = {i: f"id-{i}" for i in range(len(headers))}
        context.request_processor = [RequestProcessor(item) for item in headers]
        return context

    return begin


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Load a model whose model-config.yaml is this."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)

    def loaded(config, model=MODEL, handler="image_classifier", sizes=(), batch_size=4, **manifest):
        (tmp_path / "optimized_net.py").write_text(model)
        (tmp_path / "config.yaml").write_text(config)
        if "\n" in handler:
            (tmp_path / "own_handler.py").write_text(handler)
            handler = "own_handler"
        described = {
            "modelName": "net",
            "handler": handler,
            "modelFile": "optimized_net.py",
            "configFile": "config.yaml",
            **manifest,
        }
        (tmp_path / "MAR-INF").mkdir(exist_ok=True)
        (tmp_path / "MAR-INF" / "MANIFEST.json").write_text(json.dumps({"model": described}))
        torch.manual_seed(0)
        plan = ("net", str(tmp_path), handler, batch_size, None, True, 10**7, "1")
        return load_service(Load(*plan, compiled_sizes=list(sizes)))

    yield loaded
    for name in set(sys.modules) - before:
        if name in ("optimized_net", "own_handler"):
            del sys.modules[name]


@pytest.fixture
def compiler():
    """torch's counters, from zero; the compiler is afterwards as it was."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield torch._dynamo.utils.counters
    torch._dynamo.reset()
    torch.compiler.set_stance("default")
