import io
import warnings

import pytest
import torch

from marserve.handlers.densenet_handler import DenseNetHandler


def saved(value) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


@pytest.fixture
def answer(tmp_path, make_context, begin_batch):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(torch.nn.ReLU()), tmp_path / "model.pt")
    handler, context = DenseNetHandler(), make_context(serializedFile="model.pt")
    handler.initialize(context)

    def run(*rows):
        begin_batch(context, *([{}] * len(rows)))
        return handler.handle(list(rows), context), context

    return run


def test_one_tensor_is_answered_with_a_batch_of_one(answer):
    [output], _ = answer({"data": saved(torch.tensor([-1.0, 2.0]))})
    assert output.tolist() == [[0.0, 2.0]]


def test_each_request_of_a_batch_gets_its_own_row(answer):
    outputs, _ = answer(
        {"body": saved(torch.tensor([1.0]))}, {"body": bytearray(saved(torch.tensor([-2.0])))}
    )
    assert [item.tolist() for item in outputs] == [[1.0], [0.0]]
    assert len(saved(outputs[0])) == len(saved(torch.zeros(1)))  # a row alone, not its batch


@pytest.mark.parametrize("bad", [b"kitten", b"", None, 7, saved([1, 2]), saved(Ellipsis)])
def test_a_request_without_a_tensor_is_refused_alone(answer, bad):
    (good, refused), context = answer({"body": saved(torch.ones(1))}, {"body": bad})
    assert good.tolist() == [[1.0]]
    assert refused["code"] == context.get_response_status(1)[0] == 400
