import copy
import gc
from pathlib import Path

import pytest
import torch
from torch import nn

from marserve.handlers.model_files import load_state_dict
from marserve.handlers.performance.weights import make_with_weights


class Plain(nn.Module):
    """A typical model: layers that initialise themselves, and a second initialisation."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.words = nn.Embedding(10, 4, padding_idx=0)
        self.line = nn.Linear(8, 4)
        self.attention = nn.MultiheadAttention(8, 2)
        nn.init.kaiming_normal_(self.conv.weight, mode="fan_out")
        nn.init.trunc_normal_(self.line.weight, std=0.02)
        self.line.bias.data.normal_(0, 0.01).mul_(2)


class BuffersOfItsOwn(nn.Module):
    """Tensors outside the file, made of random numbers and initialised weights."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)
        self.register_buffer("noise", torch.randn(4), persistent=False)
        self.register_buffer("filled", torch.empty(4).fill_(3), persistent=False)
        self.drawn = torch.empty(4).uniform_()
        self.norm = nn.BatchNorm1d(4)
        self.sum = self.line.weight.detach().sum().item()
        self.first = self.line.weight[0].tolist()


class Seeded(nn.Module):
    """Seeds the generator between two initialisations, and keeps what it draws afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.empty(3).uniform_()
        self.before = nn.Linear(4, 4)
        torch.manual_seed(5)
        self.between = nn.Linear(4, 4)
        self.drawn = torch.rand(3)
        torch.manual_seed(6)
        self.seeded = torch.rand(3)
        self.after = nn.Linear(4, 4)


class Drawing(nn.Module):
    """Keeps random numbers that are drawn like weights."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)
        self.drawn = torch.empty(4).uniform_()


class RowOfATable(nn.Module):
    """A weight that is part of something larger."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.empty(2, 50).fill_(3)
        self.row = nn.Parameter(self.table[0])


class Tied(nn.Module):
    """One weight under two names, as in language models."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(6, 4)
        self.line = nn.Linear(4, 6, bias=False)
        self.line.weight = self.words.weight


class Aliased(nn.Module):
    """Keeps views of weights that are not registered."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)
        self.views = [self.line.weight.detach().t(), self.line.bias.data]
        self.array = self.line.weight.detach().numpy()


class Counting(nn.Module):
    """Keeps buffers outside the file: random numbers and constants."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(64, 64)
        self.register_buffer("positions", torch.arange(4), persistent=False)
        self.register_buffer("noise", torch.randn(4), persistent=False)


class Transposing(nn.Module):
    """A buffer outside the file that is a view of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)
        self.register_buffer("turned", self.line.weight.detach().t(), persistent=False)


class Collecting(nn.Module):
    """Keeps a tensor that a collection moves to an older generation."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)
        self.steps = [torch.arange(4)]
        gc.collect()


class Halved(nn.Module):
    """Weights of another type than the usual."""

    def __init__(self, dtype: torch.dtype = torch.float16) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4, dtype=dtype)


class Copied(nn.Module):
    """Layers that are copies of one layer."""

    def __init__(self) -> None:
        super().__init__()
        line = nn.Linear(4, 4)
        self.layers = nn.ModuleList(copy.deepcopy(line) for _ in range(2))


class Lenient(nn.Module):
    """Loads existing entries; the others keep their initial values."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)
        self.extra = nn.Parameter(torch.empty(3))
        nn.init.constant_(self.extra, 7.0)

    def load_state_dict(self, state_dict, strict=True, assign=False):
        kept = {key: value for key, value in state_dict.items() if key != "extra"}
        return super().load_state_dict(kept, strict=False)


class Refitting(nn.Module):
    """Resizes its parameter to that of the file."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(2))

    def _load_from_state_dict(self, state_dict, prefix, *args):
        self.table = nn.Parameter(torch.zeros_like(state_dict[prefix + "table"]))
        super()._load_from_state_dict(state_dict, prefix, *args)


def _plainly(make, path):
    torch.manual_seed(1)
    model = make()
    model.load_state_dict(torch.load(path, weights_only=True))
    return model


def _visible(model):
    """Return all tensors and attributes of a model, tensors as lists."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers()), **vars(model)}
    plain = {key: value for key, value in tensors.items() if not key.startswith("_")}
    return {key: _as_lists(value) for key, value in plain.items()}


def _as_lists(value):
    if isinstance(value, list):
        return [_as_lists(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value


ALL = [
    Plain,
    BuffersOfItsOwn,
    Seeded,
    Drawing,
    RowOfATable,
    Tied,
    Aliased,
    Collecting,
    Counting,
    Transposing,
    Halved,
    Copied,
    Lenient,
    Refitting,
]


@pytest.fixture
def saved(tmp_path):
    """Writes the state dict of a model to a file; returns the path."""

    def save(model, **changes):
        torch.save({**model.state_dict(), **changes}, tmp_path / "weights.pth")
        return str(tmp_path / "weights.pth")

    return save


@pytest.mark.parametrize("make", ALL)
def test_the_model_equals_one_that_is_built_and_loaded_in_the_plain_way(saved, make):
    torch.manual_seed(0)
    path = saved(make())
    expected = _visible(_plainly(make, path))
    torch.manual_seed(1)
    model = make_with_weights(make, load_state_dict(path))
    assert _visible(model) == expected


@pytest.mark.parametrize("changes", [{"weight": torch.ones(3)}, {"other": torch.ones(3)}])
def test_mismatches_have_the_plain_error_message(saved, changes):
    path = saved(nn.Linear(2, 2), **changes)
    with pytest.raises(RuntimeError) as expected:
        _plainly(lambda: nn.Linear(2, 2), path)
    with pytest.raises(RuntimeError) as error:
        make_with_weights(lambda: nn.Linear(2, 2), load_state_dict(path))
    assert str(error.value) == str(expected.value)


def test_a_wider_file_is_converted_to_the_type_of_the_model(saved):
    path = saved(Halved(torch.float32))
    assert make_with_weights(Halved, load_state_dict(path)).line.weight.dtype is (torch.float16)


def test_weights_have_the_memory_layout_of_the_model(saved):
    def make():
        return nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)

    path = saved(nn.Conv2d(3, 8, 3))
    model = make_with_weights(make, load_state_dict(path))
    assert model.weight.is_contiguous(memory_format=torch.channels_last)


def test_no_random_numbers_are_drawn(saved):
    path = saved(nn.Linear(3, 3))
    before = torch.get_rng_state()
    make_with_weights(lambda: nn.Linear(3, 3), load_state_dict(path))
    assert torch.equal(before, torch.get_rng_state())


def test_a_model_that_fails_under_a_mode_is_built_in_the_plain_way(saved):
    def make():
        if torch.overrides._get_current_function_mode() is not None:
            raise TypeError("not under a mode")
        return nn.Linear(2, 2)

    path = saved(nn.Linear(2, 2))
    model = make_with_weights(make, load_state_dict(path))
    assert model.weight.tolist() == torch.load(path)["weight"].tolist()


def test_errors_of_the_model_are_raised():
    with pytest.raises(ZeroDivisionError):
        make_with_weights(lambda: 1 / 0, {})


def test_two_weights_that_share_memory_in_the_file_do_not_share_it_in_the_model(saved):
    item = torch.ones(2, 2)
    path = saved(nn.Linear(2, 2), **{"0.weight": item, "1.weight": item})
    state = {key: value for key, value in torch.load(path).items() if key[0] in "01"}

    def make():
        return nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))

    model = make_with_weights(make, state)
    with torch.no_grad():
        model[0].weight.zero_()
    assert model[1].weight.tolist() == [[1, 1], [1, 1]]


def _is_in_mapped_file(tensor: torch.Tensor, path: str) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(path):
            start, _, end = line.split()[0].partition("-")
            if int(start, 16) <= tensor.data_ptr() < int(end, 16):
                return True
    return False


@pytest.fixture(params=["pickle", "safetensors"])
def weights_file(request, tmp_path):
    """A file with the weights of `nn.Linear(64, 64)`, in each of the two formats."""
    state = nn.Linear(64, 64).state_dict()
    if request.param == "pickle":
        torch.save(state, tmp_path / "weights.pth")
        return str(tmp_path / "weights.pth")
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file(state, tmp_path / "weights.safetensors")
    return str(tmp_path / "weights.safetensors")


def test_weights_are_in_the_mapped_file_and_writes_do_not_change_it(weights_file):
    content = Path(weights_file).read_bytes()
    model = make_with_weights(lambda: nn.Linear(64, 64), load_state_dict(weights_file))
    assert _is_in_mapped_file(model.weight, weights_file)
    assert _is_in_mapped_file(model.bias, weights_file)
    assert isinstance(model.weight, nn.Parameter)
    with torch.no_grad():
        model.weight.zero_()
    assert not model.weight.any()
    assert Path(weights_file).read_bytes() == content


def test_weights_are_in_the_mapped_file_with_buffers_that_are_not(saved):
    path = saved(Counting())
    model = make_with_weights(Counting, load_state_dict(path))
    assert model.positions.tolist() == [0, 1, 2, 3]
    assert _is_in_mapped_file(model.line.weight, path)


def test_a_weight_with_two_names_is_one_in_the_mapped_file(saved):
    path = saved(Tied())
    model = make_with_weights(Tied, load_state_dict(path))
    assert model.line.weight is model.words.weight
    assert _is_in_mapped_file(model.words.weight, path)


def test_weights_outlive_their_file(weights_file):
    model = make_with_weights(lambda: nn.Linear(64, 64), load_state_dict(weights_file))
    Path(weights_file).unlink()
    assert model(torch.ones(1, 64)).isfinite().all()


def test_unmapped_weights_are_not_in_the_file(weights_file):
    state = load_state_dict(weights_file, mapped=False)
    model = make_with_weights(lambda: nn.Linear(64, 64), state)
    assert not _is_in_mapped_file(model.weight, weights_file)
    Path(weights_file).write_bytes(b"")  # a mapping of it would kill the process
    assert model(torch.ones(1, 64)).isfinite().all()
