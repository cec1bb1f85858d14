"""Builds an eager model with its weights, without initialising them randomly first.

A plain ``model = Net(); model.load_state_dict(torch.load(path))`` draws a random number for every
weight, for longer than it reads the file (0.34 s of 0.45 s for ResNet-152), and copies what it
read. Here the model is built on torch's meta device, where tensors have a shape and no memory, and
takes the file's tensors for its own (``assign=True``). The file is mapped: workers of one archive
share its pages, and a page that a handler writes to becomes its own.

The model must not differ from a plain one, so it is built again, plainly, where it would:

* What a constructor computes from a tensor's values fails on the meta device.
* Tensors besides weights that it keeps are without values; they are found by the garbage
  collector's list of what was made since. Buffers that no file has are taken from a plain twin.

And what assignment takes from the file is put right: type and layout are the model's, weights with
two names stay one, and weights that share memory in the file only do not share it in the model.
"""

import copy
import gc
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

logger = logging.getLogger(__name__)


def make_with_weights(
    make: Callable[[], Any], read_state_dict: Callable[[], Mapping[str, Any]]
) -> Any:
    """Make a model on the CPU and load its weights, which belong to the model afterwards.

    ``make`` is called again where it does not work on the meta device. Whatever it,
    ``read_state_dict`` or the model's ``load_state_dict`` raise is the caller's.
    """
    state_dict = read_state_dict()
    try:
        # A copy: a model may take out of the mapping what it has loaded.
        with _values_missing() as missing:
            model = _assign(make, copy.copy(state_dict))
            _take_buffers(model, make)
            if not missing():
                return model
    except Exception:  # foreign code, which fails again where that is its own doing
        logger.debug("The model cannot be built on the meta device.", exc_info=True)
    model = make()
    model.load_state_dict(state_dict)
    return model


class _Form(NamedTuple):
    """What a tensor of the model is like before the weights are loaded."""

    identity: int
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype


def _assign(make: Callable[[], Any], state_dict: Mapping[str, Any]) -> Any:
    """Make a model on the meta device and have it take over the tensors of a state dict."""
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        model = make()
    forms = {
        name: _Form(id(tensor), tensor.shape, tensor.stride(), tensor.dtype)
        for name, tensor in _tensors(model).items()
    }
    with warnings.catch_warnings():
        # Of a model that copies by itself; it is built again.
        warnings.filterwarnings("ignore", ".*to a meta parameter in the current model")
        model.load_state_dict(state_dict, assign=True)
    _restore_forms(model, forms)
    return model


def _restore_forms(model: Any, forms: Mapping[str, _Form]) -> None:
    """Give tensors that were loaded the type and layout, and the owners, that they had before."""
    loaded = _tensors(model)
    # Of a weight's names the one that a plain load_state_dict copies last counts.
    last_names = {form.identity: name for name, form in forms.items()}
    memory_in_use: set[int] = set()
    for name, form in forms.items():
        if (last_name := last_names[form.identity]) != name:
            _set_tensor(model, name, loaded[last_name])
            continue
        tensor = loaded[name]
        if tensor.is_meta or tensor.shape != form.shape:  # the model fits itself to the file
            continue
        is_shared = tensor.data_ptr() in memory_in_use
        if is_shared or (tensor.dtype, tensor.stride()) != (form.dtype, form.strides):
            own = torch.empty_strided(form.shape, form.strides, dtype=form.dtype)
            tensor.data = own.copy_(tensor.detach())
        memory_in_use.add(tensor.data_ptr())


def _take_buffers(model: Any, make: Callable[[], Any]) -> None:
    """Take buffers that were not in the state dict from a model that is built plainly."""
    names = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if not names:
        return
    twin = make()
    weights = {weight.untyped_storage().data_ptr() for weight in twin.parameters()}
    for name in names:
        buffer = twin.get_buffer(name)
        if buffer.untyped_storage().data_ptr() not in weights:  # else it shows what is loaded
            _set_tensor(model, name, buffer)


@contextmanager
def _values_missing() -> Iterator[Callable[[], bool]]:
    """Tell whether tensors on the meta device, made in the ``with`` block, are still in use."""
    was_enabled, collections = gc.isenabled(), _collections()
    gc.disable()  # so that all that is made stays in the youngest generation

    def is_missing() -> bool:
        if _collections() != collections:  # the constructor's own doing: they may be anywhere
            return True
        made = gc.get_objects(generation=0)
        return any(issubclass(type(each), torch.Tensor) and each.is_meta for each in made)

    try:
        yield is_missing
    finally:
        if was_enabled:
            gc.enable()


def _collections() -> int:
    return sum(generation["collections"] for generation in gc.get_stats())


def _tensors(model: Any) -> dict[str, torch.Tensor]:
    """A model's parameters and buffers, under all of their names."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def _set_tensor(model: Any, name: str, tensor: torch.Tensor) -> None:
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, tensor)
