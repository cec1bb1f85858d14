import pytest
import torch

from marserve.backend.errors import PredictionException
from marserve.handlers.base_handler import BaseHandler
from marserve.handlers.mock_context import MockContext

MODEL_FILE = """
import torch

class Doubler(torch.nn.Module):
    def forward(self, x):
        return 2 * x
"""


@pytest.fixture
def context(tmp_path) -> MockContext:
    name = f"model_{tmp_path.name}.py"
    (tmp_path / name).write_text(MODEL_FILE)
    (tmp_path / "conf.yaml").write_text("handler: {profile: true}")
    return MockContext(None, str(tmp_path), name, None, "doubler", "conf.yaml")


def test_a_handler_is_tested_with_it(context) -> None:
    handler = BaseHandler()
    handler.initialize(context)
    assert handler.handle([{"body": [1.0]}], context) == [[2.0]]
    context.explain = True
    with pytest.raises(PredictionException, match="gives no explanations"):
        handler.handle([{"body": [1.0]}], context)


def test_what_it_says_of_the_model(context, tmp_path) -> None:
    assert context.model_name == context.metrics.model_name == "doubler"
    assert context.system_properties["model_dir"] == str(tmp_path)
    assert context.model_yaml_config == {"handler": {"profile": True}}
    assert "serializedFile" not in context.manifest["model"]


def test_what_it_says_by_default() -> None:
    context = MockContext()
    assert context.manifest == {"model": {"serializedFile": "model.pt", "modelFile": "model.py"}}
    assert (context.model_name, context.model_yaml_config) == ("mnist", {})
    expected = 0 if torch.cuda.is_available() else None
    assert context.system_properties["gpu_id"] == expected
    assert not context.get_request_header(0, "explain")
    assert context.get_request_header(0, "describe") is None
