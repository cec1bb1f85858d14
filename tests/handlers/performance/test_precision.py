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


def test_nested_floats_are_cast() -> None:
    values = cast_inputs(lambda *args, **kwargs: (args, kwargs), BF16)(
        torch.ones(2), [torch.ones(2), {"deep": torch.ones(2)}], "text", ids=torch.tensor([1])
    )
    (item, [two, nested], text), named = values
    assert (item.dtype, two.dtype, nested["deep"].dtype) == (BF16, BF16, BF16)
    assert text == "text"
    assert named["ids"].dtype == torch.int64


def test_type_and_layout_of_images_are_changed_together() -> None:
    to_last = cast_inputs(lambda item: item, BF16, channels_last=True)
    image, row = to_last(torch.ones(2, 3, 4, 4)), to_last(torch.ones(2, 3))
    assert image.is_contiguous(memory_format=torch.channels_last)
    assert (image.dtype, row.dtype) == (BF16, BF16)


def test_the_layout_without_a_type() -> None:
    to_last = cast_inputs(lambda item: item, None, channels_last=True)
    assert to_last(torch.ones(2, 3, 4, 4)).dtype == torch.float32


def test_outputs_are_fp32() -> None:
    raised = raise_outputs(lambda: {"out": torch.ones(1, dtype=BF16), "kept": (torch.tensor(1),)})()
    assert raised["out"].dtype == torch.float32
    assert raised["kept"][0].dtype == torch.int64


def test_doubles_are_not_changed() -> None:
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
    [(False, BF16, [BF16, BF16]), (True, torch.float32, [BF16, torch.float32])],
)
def test_cast_layers(matmul_only: bool, norm: torch.dtype, inside: list[torch.dtype]) -> None:
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


def test_casts_work_in_other_threads() -> None:
    multiply = autocast(lambda: torch.ones(2, 2) @ torch.ones(2, 2), torch.device("cpu"), BF16)
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(multiply).result().dtype == BF16
