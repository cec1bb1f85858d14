from collections.abc import Callable

import pytest
import torch
from torch import nn

from marserve.handlers.performance.batch_norm import fold_batch_norms


def lived(model: nn.Module) -> nn.Module:
    """A trained model in evaluation mode."""
    torch.manual_seed(0)
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
            for values in (norm.running_mean, norm.weight, norm.bias):
                if values is not None:
                    values.data.normal_()
            if norm.running_var is not None:
                norm.running_var.uniform_(0.5, 2)
    return model.eval()


def sequence(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers)


class Residual(nn.Module):
    """A convolution whose result is used twice, one used once, and one that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.shared_norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
        self.own, self.own_norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
        self.twice, self.twice_norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
        self.read, self.read_norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = self.shared(x)
        x = self.shared_norm(product) + product
        x = self.own_norm(self.own(x))
        x = self.twice(self.twice_norm(self.twice(x)))
        return self.read_norm(self.read(x)) * self.read.weight.mean()


class Choosing(nn.Module):
    """torch.fx can trace only its submodules."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(x) if x.sum() > 0 else self.first(x)


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "1d": (lambda: sequence(nn.Conv1d(3, 5, 3), nn.BatchNorm1d(5)), (2, 3, 8), 1),
    "2d": (lambda: sequence(nn.Conv2d(3, 5, 3, bias=False), nn.BatchNorm2d(5)), (2, 3, 8, 8), 1),
    "3d": (lambda: sequence(nn.Conv3d(3, 5, 3), nn.BatchNorm3d(5)), (2, 3, 4, 4, 4), 1),
    "groups": (
        lambda: sequence(nn.Conv2d(4, 8, 3, groups=2, stride=2), nn.BatchNorm2d(8)),
        (2, 4, 8, 8),
        1,
    ),
    "transposed": (
        lambda: sequence(nn.ConvTranspose2d(3, 5, 3), nn.BatchNorm2d(5)),
        (2, 3, 8, 8),
        1,
    ),
    "transposed-groups": (
        lambda: sequence(nn.ConvTranspose2d(4, 8, 3, groups=2), nn.BatchNorm2d(8)),
        (2, 4, 8, 8),
        0,
    ),
    "not-affine": (
        lambda: sequence(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5, affine=False)),
        (2, 3, 8, 8),
        1,
    ),
    "no-statistics": (
        lambda: sequence(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5, track_running_stats=False)),
        (2, 3, 8, 8),
        0,
    ),
    "norm-first": (lambda: sequence(nn.BatchNorm2d(3), nn.Conv2d(3, 5, 3)), (2, 3, 8, 8), 0),
    "relu-between": (
        lambda: sequence(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.BatchNorm2d(5)),
        (2, 3, 8, 8),
        0,
    ),
    "deep": (
        lambda: sequence(sequence(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU()), nn.Flatten()),
        (2, 3, 8, 8),
        1,
    ),
    "residual": (Residual, (2, 3, 4, 4), 1),
    "untraceable": (Choosing, (2, 3, 8, 8), 2),
    "linear": (lambda: sequence(nn.Linear(3, 3), nn.BatchNorm1d(3)), (2, 3), 0),
}


@pytest.mark.parametrize("case", CASES)
def test_folding_does_not_change_results(case):
    make, shape, count = CASES[case]
    model = lived(make())
    with torch.inference_mode():
        images = torch.randn(shape)
        expected = model(images), model(-images)
        norms = _norms(model)
        assert fold_batch_norms(model) == count
        assert len(_norms(model)) == len(norms) - count
        torch.testing.assert_close((model(images), model(-images)), expected, rtol=1e-4, atol=1e-4)


def _norms(model: nn.Module) -> list[nn.Module]:
    return [item for item in model.modules() if "BatchNorm" in type(item).__name__]


def test_the_model_stays_the_same_object():
    model = lived(Choosing())
    fold_batch_norms(model)
    assert isinstance(model, Choosing)
    assert fold_batch_norms(model) == 0


def test_layers_with_hooks_are_kept():
    model = lived(nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)))
    heard = []
    model[0].register_forward_hook(lambda _layer, _values, result: heard.append(result))
    assert fold_batch_norms(model) == 0
