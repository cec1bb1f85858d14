import shutil

import pytest
import torch

from marserve.handlers.model_files import load_exported
from marserve.handlers.performance.program_rows import ProgramForRows

Dim = torch.export.Dim


class Net(torch.nn.Module):
    """Two results with a row for each row of two arguments."""

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"weighted": torch.softmax(x.sin(), -1) * weight, "sum": x.sum(-1)}


class Total(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum()


def batch(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.arange(rows * 2.0).reshape(rows, 2)
    return numbers, numbers[:, :1] + 1


def program(model: torch.nn.Module, *args: torch.Tensor, size=None) -> torch.export.ExportedProgram:
    dynamic = None if size is None else tuple({0: size} for _ in args)
    return torch.export.export(model, args, dynamic_shapes=dynamic)


def loaded(tmp_path, exported: torch.export.ExportedProgram):
    torch.export.save(exported, tmp_path / "net.pt2")
    return load_exported(str(tmp_path / "net.pt2"), torch.device("cpu"))


def assert_runs(model, rows: int) -> None:
    x, weight = batch(rows)
    expected, result = Net()(x, weight), model(x, weight)
    torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("rows", [1, 3, 4, 5, 8, 11])
@pytest.mark.parametrize("fixed", [1, 4])
def test_a_program_of_a_fixed_batch_runs_batches_of_any_size(tmp_path, fixed, rows):
    model = loaded(tmp_path, program(Net(), *batch(fixed)))
    assert model.rows == (fixed, fixed)
    assert_runs(model, rows)


@pytest.mark.parametrize("rows", [1, 3, 8, 9, 20])
def test_a_program_of_a_range_of_sizes_runs_batches_of_any_size(tmp_path, rows):
    model = loaded(tmp_path, program(Net(), *batch(4), size=Dim("rows", min=3, max=8)))
    assert str(model.rows) == "3 to 8"
    assert_runs(model, rows)


@pytest.mark.parametrize("size", [Dim.DYNAMIC, Dim("rows")])
def test_a_program_for_any_size_is_left_alone(tmp_path, size):
    model = loaded(tmp_path, program(Net(), *batch(4), size=size))
    assert not isinstance(model, ProgramForRows)
    assert_runs(model, 1)


def test_inputs_of_different_sizes_are_not_batches(tmp_path):
    model = loaded(tmp_path, program(Net(), batch(4)[0], torch.ones(1, 1)))
    assert not isinstance(model, ProgramForRows)


def test_results_without_rows_are_not_cut(tmp_path):
    model = loaded(tmp_path, program(Total(), torch.ones(4, 2)))
    assert model(torch.ones(4, 2)) == 8
    with pytest.raises(RuntimeError, match=r"exported for 4 rows .* cannot run 3"):
        model(torch.ones(3, 2))


@pytest.mark.integration
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a compiler")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("size", "rows"), [(None, "4"), (Dim.DYNAMIC, "")])
def test_a_package_of_a_fixed_batch_runs_batches_of_any_size(tmp_path, size, rows):
    path = str(tmp_path / "net.pt2")
    exported = program(Net(), *batch(4), size=size)
    torch._inductor.aoti_compile_and_package(exported, package_path=path)
    model = load_exported(path, torch.device("cpu"))
    assert str(getattr(model, "rows", "")) == rows
    for count in (1, 4, 6):
        assert_runs(model, count)


@pytest.mark.parametrize(
    ("batch_size", "warning"),
    [
        (1, "but batchSize is 1: each batch is filled up. Set batchSize to 4,"),
        (4, ""),
        (8, "but batchSize is 8: larger ones are run in pieces. Set batchSize to 4,"),
    ],
)
def test_another_batch_size_is_a_warning(tmp_path, batch_size, warning):
    model = loaded(tmp_path, program(Net(), *batch(4)))
    found = list(model.rows.warnings("net.pt2", batch_size))
    assert len(found) == bool(warning)
    assert all(warning in sentence for sentence in found)
