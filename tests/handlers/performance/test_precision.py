import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from marserve.handlers.performance.precision import (
    autocast,
    cast_inputs,
    lower_weights,
    raise_outputs,
)

BF16 = torch.bfloat16


def test_nested_floats_are_cast():
    values = cast_inputs(lambda *args, **kwargs: (args, kwargs), BF16)(
        torch.ones(2), [torch.ones(2), {"deep": torch.ones(2)}], "text", ids=torch.tensor([1])
    )
    (item, [two, nested], text), named = values
    assert (item.dtype, two.dtype, nested["deep"].dtype) == (BF16, BF16, BF16)
    assert text == "text"
    assert named["ids"].dtype == torch.int64


def test_type_and_layout_of_images_are_changed_together():
    to_last = cast_inputs(lambda item: item, BF16, channels_last=True)
    image, row = to_last(torch.ones(2, 3, 4, 4)), to_last(torch.ones(2, 3))
    assert image.is_contiguous(memory_format=torch.channels_last)
    assert (image.dtype, row.dtype) == (BF16, BF16)


def test_the_layout_without_a_type():
    to_last = cast_inputs(lambda item: item, None, channels_last=True)
    assert to_last(torch.ones(2, 3, 4, 4)).dtype == torch.float32


def test_outputs_are_fp32():
    raised = raise_outputs(lambda: {"out": torch.ones(1, dtype=BF16), "kept": (torch.tensor(1),)})()
    assert raised["out"].dtype == torch.float32
    assert raised["kept"][0].dtype == torch.int64


def test_doubles_are_not_changed():
    assert raise_outputs(lambda: torch.ones(1, dtype=torch.float64))().dtype == torch.float64


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.norm = torch.nn.LayerNorm(4)
        self.attention = torch.nn.MultiheadAttention(4, 2)
        self.types: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = self.linear(x)
        normal = self.norm(product)
        self.types = [product.dtype, (x + x).dtype]
        seen, _ = self.attention(normal, normal, normal)
        return seen


@pytest.mark.parametrize(
    ("matmul_only", "norm", "inside"),
    [(False, BF16, [BF16, BF16]), (True, torch.float32, [torch.float32, torch.float32])],
)
def test_cast_layers(matmul_only, norm, inside):
    torch.manual_seed(0)
    net, x = Net().eval(), torch.randn(3, 4)
    with torch.inference_mode():
        expected = net(x)
        lower_weights(net, BF16, matmul_only=matmul_only)
        forward = net.forward if not matmul_only else autocast(net, torch.device("cpu"), BF16)
        values = raise_outputs(cast_inputs(forward, None if matmul_only else BF16))(x)
    assert (net.linear.weight.dtype, net.norm.weight.dtype) == (BF16, norm)
    assert net.types == inside
    torch.testing.assert_close(values, expected, rtol=0.05, atol=0.05)


def test_casts_work_in_other_threads():
    third = torch.full((1, 1), 1 / 3)
    multiply = autocast(lambda: third @ third, torch.device("cpu"), BF16)
    with ThreadPoolExecutor(1) as thread:
        product = thread.submit(multiply).result()
    assert product.dtype == torch.float32
    assert product == (third.to(BF16) @ third.to(BF16)).float()


class Encoder(torch.nn.Sequential):
    def __init__(self) -> None:
        layer = torch.nn.TransformerEncoderLayer(64, 4, 256, activation="gelu", batch_first=True)
        super().__init__(torch.nn.TransformerEncoder(layer, 6))


class Products(torch.nn.Module):
    """Products of several kinds, whose results are fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.image = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.Flatten())
        self.lstm = torch.nn.LSTM(144, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = [self.image(x)]
        values.append(torch.einsum("ij,kj->ik", values[0], values[0]))
        values.append(self.lstm(values[0][None])[0])
        values.append(values[0] @ values[0].T)
        assert {value.dtype for value in values} == {torch.float32}
        return values[-1].softmax(-1)


def relative_error(value: torch.Tensor, expected: torch.Tensor) -> float:
    return ((value - expected).norm() / expected.norm()).item()


@pytest.fixture
def lowered():
    """Return a function that lowers the precision of a model, or of its products."""

    def lowered(net, *, matmul_only):
        lower_weights(net, BF16, matmul_only=matmul_only)
        if matmul_only:
            return raise_outputs(autocast(net, torch.device("cpu"), BF16))
        return raise_outputs(cast_inputs(net, BF16))

    was_enabled = torch.backends.mha.get_fastpath_enabled()
    yield lowered
    torch.backends.mha.set_fastpath_enabled(was_enabled)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("seed", range(3))
def test_what_follows_products_is_fp32_and_halves_the_error_of_an_encoder(lowered, seed):
    torch.manual_seed(seed)
    net, x = Encoder().eval(), torch.randn(4, 16, 64)
    with torch.inference_mode():
        expected = net(x)
        products = lowered(copy.deepcopy(net), matmul_only=True)(x)
        everything = lowered(net, matmul_only=False)(x)
    error = relative_error(products, expected)
    assert 0 < error < relative_error(everything, expected) / 2


def test_results_of_all_kinds_of_products_are_fp32(lowered):
    torch.manual_seed(0)
    net, x = Products().eval(), torch.randn(3, 1, 8, 8)
    with torch.inference_mode():
        expected = net(x)
        assert 0 < relative_error(lowered(net, matmul_only=True)(x), expected) < 0.02


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_a_compiled_model_has_the_same_precision(lowered):
    torch.manual_seed(0)
    net, x = Encoder().eval(), torch.randn(4, 16, 64)
    with torch.inference_mode():
        plain = lowered(copy.deepcopy(net), matmul_only=True)(x)
        compiled = lowered(torch.compile(net, backend="aot_eager"), matmul_only=True)(x)
    assert relative_error(compiled, plain) < 1e-3
