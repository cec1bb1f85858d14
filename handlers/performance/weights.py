"""Builds an eager model with its weights, without initialising them randomly.

``model = Net(); model.load_state_dict(torch.load(path))`` draws a random number for every weight
(0.34 s of 0.45 s for ResNet-152) and copies the file's tensors. Here the model is built on torch's
meta device, where tensors have no memory, and takes over the tensors of the mapped file
(``assign=True``), whose pages processes share until they write to them.

The model is built again in the plain way if the result would differ:

* A constructor that computes with a tensor's values fails on the meta device.
* Other tensors that the model keeps have no values. The garbage collector's list of new objects
  shows them. Buffers that are not in the file are taken from a second, plain model.

After the assignment, types and layouts become the model's, weights with two names are one object
again, and weights that share memory only in the file get separate memory.
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

_LOW = {torch.float16: "fp16", torch.bfloat16: "bf16"}


def make_with_weights(make: Callable[[], Any], state_dict: Mapping[str, Any]) -> Any:
    """Return a model on the CPU with its weights; ``make`` may be called several times."""
    try:
        # A copy, since a model may remove entries that it has loaded.
        with _values_missing() as missing:
            model = _assign(make, copy.copy(state_dict))
            _take_buffers(model, make)
            if not missing():
                return model
    except Exception:  # foreign code; its own errors occur again below
        logger.debug("The model cannot be built on the meta device.", exc_info=True)
    model = make()
    model.load_state_dict(state_dict)
    return model


def raised_precision(model: Any, state_dict: Mapping[str, Any]) -> str:
    """Return the precision of saved weights that a model has raised to fp32; empty for none."""
    if isinstance(model, torch.nn.Module) and isinstance(state_dict, Mapping):  # not duck-typed
        for name, tensor in _tensors(model).items():
            saved = getattr(state_dict.get(name), "dtype", torch.float32)
            if saved in _LOW and tensor.dtype == torch.float32:
                return _LOW[saved]
    return ""


class _Form(NamedTuple):
    identity: int
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype


def _assign(make: Callable[[], Any], state_dict: Mapping[str, Any]) -> Any:
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        model = make()
    forms = {
        name: _Form(id(tensor), tensor.shape, tensor.stride(), tensor.dtype)
        for name, tensor in _tensors(model).items()
    }
    with warnings.catch_warnings():
        # From a model that copies by itself, which is built again.
        warnings.filterwarnings("ignore", ".*to a meta parameter in the current model")
        model.load_state_dict(state_dict, assign=True)
    _restore_forms(model, forms)
    return model


def _restore_forms(model: Any, forms: Mapping[str, _Form]) -> None:
    loaded = _tensors(model)
    # Of a weight with several names, a plain load_state_dict keeps the last.
    last_names = {form.identity: name for name, form in forms.items()}
    memory_in_use: set[int] = set()
    for name, form in forms.items():
        if (last_name := last_names[form.identity]) != name:
            set_part(model, name, loaded[last_name])
            continue
        tensor = loaded[name]
        if tensor.is_meta or tensor.shape != form.shape:  # the model adapts to the file
            continue
        is_shared = tensor.data_ptr() in memory_in_use
        if is_shared or (tensor.dtype, tensor.stride()) != (form.dtype, form.strides):
            own = torch.empty_strided(form.shape, form.strides, dtype=form.dtype)
            tensor.data = own.copy_(tensor.detach())
        memory_in_use.add(tensor.data_ptr())


def _take_buffers(model: Any, make: Callable[[], Any]) -> None:
    """Take buffers that were not in the state dict from a second model, built in the plain way."""
    names = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if not names:
        return
    twin = make()
    weights = {weight.untyped_storage().data_ptr() for weight in twin.parameters()}
    for name in names:
        buffer = twin.get_buffer(name)
        if buffer.untyped_storage().data_ptr() not in weights:  # else it is a view of a weight
            set_part(model, name, buffer)


@contextmanager
def _values_missing() -> Iterator[Callable[[], bool]]:
    """Yield a function that finds meta tensors of the ``with`` block that are still in use."""
    was_enabled, collections = gc.isenabled(), _collections()
    gc.disable()  # new objects stay in the youngest generation

    def is_missing() -> bool:
        if _collections() != collections:  # a constructor collected: they may be in any generation
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
    """Return parameters and buffers under all of their names."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def set_part(model: Any, name: str, value: Any) -> None:
    """Replace a tensor or a submodule by its full name."""
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, value)
