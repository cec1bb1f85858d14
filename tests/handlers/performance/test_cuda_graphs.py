"""CUDA graphs, mostly without a GPU: `Recorder` replaces the graph."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from marserve.handlers.performance.cuda_graphs import CudaGraphs, Replay, record_graph
from marserve.handlers.performance.fixed_sizes import BatchSizes, FixedSizes
from marserve.handlers.performance.optimization import Optimization
from marserve.handlers.performance.optimized_model import OptimizedModel, optimize
from marserve.handlers.performance.precision import Forward
from marserve.handlers.performance.torch_compile import Compilation


class Recorder:
    """Records like CUDA: replays use the memory of the first call."""

    def __init__(self) -> None:
        self.recorded: list[list[tuple[int, ...]]] = []
        self.replays = 0

    def __call__(self, forward: Forward, tensors: Sequence[torch.Tensor]) -> Replay:
        self.recorded.append([tuple(item.shape) for item in tensors])
        inputs = [item.clone() for item in tensors]

        def replay(values: Sequence[torch.Tensor]) -> Any:
            self.replays += 1
            for mine, yours in zip(inputs, values, strict=True):
                mine.copy_(yours)
            return forward(*inputs)

        return replay


def scaled(x: torch.Tensor, by: int = 2, mask: torch.Tensor | None = None) -> torch.Tensor:
    return x * by if mask is None else x * by * mask


@pytest.fixture
def recorder():
    return Recorder()


@torch.inference_mode()
def test_each_shape_is_recorded_once_and_replayed(recorder):
    graphs = CudaGraphs(scaled, recorder)
    for rows in (1, 4):
        graphs(torch.zeros(rows, 2))
    graphs.end_warm_up()
    assert torch.equal(graphs(torch.ones(4, 2)), torch.full((4, 2), 2.0))
    assert recorder.recorded == [[(1, 2)], [(4, 2)]]
    assert recorder.replays == 3


@torch.inference_mode()
def test_nothing_is_recorded_after_the_warm_up(recorder):
    graphs = CudaGraphs(scaled, recorder)
    graphs.end_warm_up()
    assert graphs(torch.ones(3)).tolist() == [2.0, 2.0, 2.0]
    assert recorder.recorded == []


@torch.inference_mode()
def test_other_arguments_are_another_graph(recorder):
    graphs = CudaGraphs(scaled, recorder)
    mask = torch.tensor([0.0, 1.0])
    assert graphs(torch.ones(2), by=3).tolist() == [3.0, 3.0]
    assert graphs(torch.ones(2), by=5).tolist() == [5.0, 5.0]
    assert graphs(torch.ones(2), mask=mask).tolist() == [0.0, 2.0]
    assert recorder.recorded == [[(2,)], [(2,)], [(2,), (2,)]]


def test_calls_with_gradients_are_not_recorded(recorder):
    x = torch.ones(2, requires_grad=True)
    CudaGraphs(scaled, recorder)(x).sum().backward()
    assert x.grad is not None
    assert recorder.recorded == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_graph_of_cuda():
    with torch.inference_mode():
        layer = torch.nn.Linear(4, 4).cuda()
        replay = record_graph(layer, [torch.zeros(2, 4, device="cuda")])
        first, second = torch.randn(2, 2, 4, device="cuda").unbind()
        results = replay([first]), replay([second])
        torch.testing.assert_close(results, (layer(first), layer(second)))


def test_batches_are_filled_up_to_recorded_sizes(make_context):
    context = make_context(yaml={"optimization": {"cuda_graphs": True}})
    optimized = optimize(torch.nn.Linear(4, 4).eval(), context, torch.device("cuda"))
    assert optimized is not None
    assert optimized.model.forward is optimized.fixed


def test_the_recorded_sizes_are_described(recorder):
    model = torch.nn.Linear(4, 4)
    graphs = CudaGraphs(model.forward, recorder)
    fixed = FixedSizes(graphs)
    optimized = OptimizedModel(
        model,
        Optimization(cuda_graphs=True),
        BatchSizes((2, 4), 4),
        graphs=graphs,
        fixed=fixed,
        compilation=Compilation({"by": "cuda_graphs"}, graphs.count),
    )

    @torch.inference_mode()
    def run(rows=1, _file=""):
        fixed(torch.zeros(rows, 4))

    optimized.warm_up(run)
    told = optimized.describe()["optimization"]["compiled"]
    assert [(each["size"], each["graphs"]) for each in told["sizes"]] == [(2, 1), (4, 1)]
    assert told["otherSizes"] == "filled up to these"
