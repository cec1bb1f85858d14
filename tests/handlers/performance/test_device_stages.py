import contextlib
import gc
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from marserve.backend.errors import OptionRefused
from marserve.handlers.performance.device_stages import DeviceStages, stages_of

CPU = torch.device("cpu")


def staged(*stages: Callable[[Any], Any]) -> DeviceStages:
    return DeviceStages([(stage, CPU) for stage in stages], CPU)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 9])
def test_the_result_is_that_of_the_plain_model(rows):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    x = torch.randn(rows, 3)
    with torch.inference_mode():
        result = staged(*stages_of(model, 2))(x)
        assert result.is_inference()
        torch.testing.assert_close(result, model(x))


def test_one_piece_is_in_the_first_stage_while_another_is_in_the_second():
    meeting = threading.Barrier(2, timeout=30)
    turns = {"first": itertools.count(), "second": itertools.count()}

    def first(x):
        if next(turns["first"]) == 1:
            meeting.wait()
        return x + 1

    def second(x):
        if next(turns["second"]) == 0:
            meeting.wait()
        return x * 2

    result = staged(first, second)(torch.arange(4.0).unsqueeze(1))
    assert result.flatten().tolist() == [2.0, 4.0, 6.0, 8.0]


def test_batches_of_several_threads_are_cut_into_larger_pieces():
    pieces = []
    first_is_in, second_is_through = threading.Event(), threading.Event()

    def first(x):
        if x[0] == 2:
            pieces.append(len(x))
        return x

    def second(x):
        if x[0] == 1:
            first_is_in.set()
            assert second_is_through.wait(30)
        return x

    stages = staged(first, second)
    with ThreadPoolExecutor(2) as threads:
        one = threads.submit(stages, torch.ones(1, 1))
        assert first_is_in.wait(30)
        other = threads.submit(stages, torch.full((8, 1), 2.0))
        wait_until(lambda: sum(pieces) == 8)
        second_is_through.set()
        assert one.result().item() == 1.0
        assert other.result().flatten().tolist() == [2.0] * 8
    assert pieces == [4, 4]  # alone it would be four pieces of 2


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # it sets the context itself
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_stages_on_gpus():
    devices = [torch.device("cuda", place % torch.cuda.device_count()) for place in range(2)]
    layers = [torch.nn.Linear(4, 4).to(device) for device in devices]
    stages = DeviceStages(list(zip(layers, devices, strict=True)), devices[0])
    batches = [torch.randn(3, 4, device=devices[0]) for _ in range(20)]
    with torch.no_grad(), ThreadPoolExecutor(3) as threads:
        results = list(threads.map(stages, batches))
        plain = [layers[1](layers[0](batch).to(devices[1])).to(devices[0]) for batch in batches]
    torch.testing.assert_close(results, plain)


def test_structures_of_tensors_are_cut_and_joined():
    def swap(pair):
        return {"b": pair["a"], "a": pair["b"]}

    values = {"a": torch.arange(5).unsqueeze(1), "b": torch.zeros(5, 2)}
    result = staged(swap, swap)(values)
    assert torch.equal(result["a"], values["a"])
    assert torch.equal(result["b"], values["b"])


def test_a_failure_is_raised_and_the_next_batch_works():
    def picky(x):
        if (x < 0).any():
            raise ValueError("negative")
        return x

    stages = staged(picky, picky)
    with pytest.raises(ValueError, match="negative"):
        stages(torch.tensor([[1.0], [-1.0]]))
    assert stages(torch.ones(2, 1)).flatten().tolist() == [1.0, 1.0]


def test_a_failed_batch_leaves_no_tensors_behind():
    left = []

    def fail(x):
        activations = x * 2
        left.append(weakref.ref(activations))
        raise RuntimeError("out of memory")

    gc.disable()
    try:
        with contextlib.suppress(RuntimeError):
            staged(fail, fail)(torch.ones(2, 1))
        assert [held() for held in left] == [None]  # the second piece was skipped
    finally:
        gc.enable()


def test_gradients_pass_through_the_stages():
    x = torch.ones(3, 1, requires_grad=True)
    staged(lambda x: x * 2, lambda x: x * 3)(x).sum().backward()
    assert x.grad is not None
    assert x.grad.flatten().tolist() == [6.0, 6.0, 6.0]


@pytest.mark.parametrize(
    ("widths", "parts", "lengths"),
    [
        ([1, 1, 1, 1], 2, [2, 2]),
        ([9, 1, 1, 1], 2, [1, 3]),
        ([1, 1, 9], 2, [2, 1]),
        ([1, 1, 1], 3, [1, 1, 1]),
        ([5, 5, 1, 1, 8], 3, [1, 3, 1]),
    ],
)
def test_stages_are_partitioned_evenly(widths, parts, lengths):
    stages = [nn.Linear(1, width) for width in widths]
    groups = stages_of(nn.Sequential(*stages), parts)
    assert [len(item) for item in groups] == lengths
    assert [layer for group in groups for layer in group] == stages


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList([nn.ReLU(), nn.Tanh()])


def test_the_stages_of_a_model_are_its_attribute():
    named = Named()
    assert [list(part) for part in stages_of(named, 2)] == [[each] for each in named.stages]


class Residual(nn.Module):
    """A block whose inner values are two."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU())
        self.scale = nn.Parameter(torch.full((1,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.inner(x)


class Blocks(nn.Module):
    def __init__(self, blocks: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Residual(8) for _ in range(blocks)])
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        for block in self.blocks:
            x = block(x)
        if mask is not None:
            x = x * mask
        return {"scores": self.head(x), "norm": x.norm(dim=1)}


class Masked(Blocks):
    """The argument is read by each block."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = x
        for block in self.blocks:
            values = block(values) * x
        return self.head(values)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.middle, self.last = nn.ReLU(), nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.tied(self.middle(self.first(x))))


class Twice(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(super().forward(x))


class Branching(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


class Pair(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y


class Listed(nn.Module):
    def forward(self, *arguments: torch.Tensor) -> torch.Tensor:
        return arguments[0]


class Switched(Blocks):
    """The arguments of a model have defaults of any type."""

    def forward(
        self,
        x: torch.Tensor,
        scaled: bool = False,
        times: int = 2,
        sizes: Sequence[int] = (8, 3),
        *,
        name: str = "scores",
    ) -> dict[str, torch.Tensor]:
        found = super().forward(x / 2 if scaled else x)
        return {name: times * found["scores"], "norm": found["norm"][:, None].expand(-1, sizes[1])}


class Backbone(Blocks):
    """Its stages are not all that it calls."""

    def __init__(self) -> None:
        super().__init__()
        self.stages, self.blocks = self.blocks, nn.ModuleList()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            x = stage(x)
        return self.head(x)


class Counted(Blocks):
    """Has an attribute of the name that is none of modules."""

    stages = 4


@pytest.mark.parametrize("parts", [2, 3, 5])
@pytest.mark.parametrize("kind", [Blocks, Masked, Switched, Backbone, Counted])
def test_a_model_that_is_not_sequential_is_cut(kind, parts):
    torch.manual_seed(0)
    model, x = kind().eval(), torch.randn(7, 8)
    with torch.inference_mode():
        found = staged(*stages_of(model, parts))(x)
        torch.testing.assert_close(found, model(x))


def test_it_is_cut_where_the_fewest_values_are_transferred():
    first, second = stages_of(Blocks().eval(), 2)
    values = first(torch.randn(2, 8))
    assert [value.shape for value in values] == [(2, 8)]
    sizes = [sum(each.numel() for each in part.parameters()) for part in (first, second)]
    assert abs(sizes[0] - sizes[1]) <= 150  # at most a block


def test_resnet_50_is_cut():
    torchvision = pytest.importorskip("torchvision")
    torch.manual_seed(0)
    model, x = torchvision.models.resnet50(weights=None).eval(), torch.randn(3, 3, 64, 64)
    with torch.inference_mode():
        parts = stages_of(model, 3)
        torch.testing.assert_close(staged(*parts)(x), model(x), rtol=1e-4, atol=1e-4)
        assert [len(part(x)) for part in parts[:1]] == [1]
    weights = [{id(each) for each in part.parameters()} for part in parts]
    assert sum(map(len, weights)) == len(list(model.parameters()))


def test_weights_that_are_read_twice_stay_in_one_part():
    first, second = stages_of(Tied(), 2)
    assert len(list(first.parameters())) == 3  # two biases
    assert [tuple(each.shape) for each in second.parameters()] == [(4, 4), (4,)]


def test_an_nn_sequential_with_its_own_forward_is_traced():
    model = Twice(nn.Linear(4, 4), nn.ReLU()).eval()
    x = torch.randn(2, 4)
    torch.testing.assert_close(staged(*stages_of(model, 2))(x), model(x))


def test_a_module_that_cannot_be_traced_stays_whole():
    model = Blocks()
    model.blocks.insert(3, Branching())
    x = torch.randn(1, 8)
    with torch.inference_mode():
        torch.testing.assert_close(staged(*stages_of(model.eval(), 2))(x), model(x))


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (nn.Linear(1, 1), "Linear has 1 parts for 2 devices"),
        (nn.Sequential(nn.ReLU()), "Sequential has 1 parts for 2 devices"),
        (nn.Sequential(Branching()), r"Sequential has 1 .*; not traced: 0 \(Branching\): .* flow"),
        (Branching(), "Branching cannot be traced: .* control flow"),
        (Listed(), "Listed does not take exactly one input"),
        (Pair(), "Pair does not take exactly one input"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused(model, sentence):
    with pytest.raises(OptionRefused, match=f"device_stages: {sentence}"):
        stages_of(model, 2)
