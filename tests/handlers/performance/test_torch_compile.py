import pytest
import torch

from marserve.handlers.performance.torch_compile import compile_arguments, compile_model


@pytest.mark.parametrize(
    ("pt2", "arguments"),
    [
        (None, None),
        ({}, None),
        ("inductor", {"backend": "inductor"}),
        ({"backend": "eager", "mode": "default"}, {"backend": "eager", "mode": "default"}),
        ({"compile": {"enable": True, "backend": "eager"}}, {"backend": "eager"}),
        ({"compile": {"enable": False, "backend": "eager"}}, None),
        ({"compile": {"backend": "eager"}}, {"backend": "eager"}),
        ({"export": {"aot_compile": True}}, None),
    ],
)
def test_the_forms_of_pt2(pt2, arguments):
    assert compile_arguments(pt2) == arguments


def test_old_forms_are_deprecated(caplog):
    compile_arguments("inductor")
    assert "deprecated" in caplog.text


@pytest.mark.parametrize(
    ("pt2", "is_compiled"), [({"compile": {"backend": "eager"}}, True), ({}, False)]
)
def test_a_model_is_compiled_only_if_configured(pt2, is_compiled):
    model = torch.nn.Identity()
    compiled = compile_model(model, pt2, [])
    assert compiled is not model
    assert (compiled is not None) is is_compiled
