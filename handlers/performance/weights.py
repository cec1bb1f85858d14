"""An eager model and its weights, made once: what is loaded is neither invented nor copied first.

A plain ``model = Net(); model.load_state_dict(torch.load(path))`` holds every weight three times
(random numbers that nobody will see, the file's, and their copy) and draws the random numbers for
longer than it reads the file: 0.34 s of 0.45 s for ResNet-152. Here

* initialisations are put off while the class builds itself, and forgotten once the tensor is
  loaded (`DeferredInitialisation`);
* the tensors of the file, which is mapped into memory, become the model's own instead of being
  copied into it. Workers of one archive share the pages; a page that a handler writes to becomes
  its own, and the file stays as it is.

Nothing else may differ from the plain way. So both hook into what torch itself calls, below the
model's own ``load_state_dict`` with its hooks, strictness and error messages, and both step back
wherever a difference could be seen: an initialisation runs, in its turn and with its random
numbers, as soon as anything but another initialisation happens; a tensor is copied where somebody
else still looks at the memory it would leave.

Why not ``torch.device("meta")`` and ``load_state_dict(assign=True)``: buffers that are not in the
file, and everything a model computes from its weights while it is built, would be lost; weights
would take the file's dtype instead of the model's, and aliases of them would go stale.
"""

import itertools
import logging
from collections.abc import Callable, Mapping
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

logger = logging.getLogger(__name__)

# Methods that change a tensor in place and look at nothing but it and scalars.
_FILLS = frozenset((torch.Tensor.fill_, torch.Tensor.zero_))
_CHANGES = _FILLS | {
    getattr(torch.Tensor, f"{name}_")
    for name in ("add", "clamp", "div", "erfinv", "mul", "normal", "sub", "uniform")
}
# What looks at no weight: makers of fresh memory, and questions about a tensor's form.
_HARMLESS = frozenset(
    (
        torch._C._set_grad_enabled,  # noqa: SLF001 - how torch.no_grad shows itself here
        torch.empty,
        torch.ones,
        torch.zeros,
        torch.Tensor.dim,
        torch.Tensor.is_contiguous,
        torch.Tensor.is_floating_point,
        torch.Tensor.numel,
        torch.Tensor.requires_grad_,
        torch.Tensor.size,
    )
)
_SCALARS = (bool, int, float, str, type(None))
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)


def make_with_weights(
    make: Callable[[], Any], read_state_dict: Callable[[], Mapping[str, Any]]
) -> Any:
    """Make a model on the CPU and load its weights into it.

    Args:
        make: Makes the model; called a second time if it fails when initialisations are put off.
        read_state_dict: Reads the weights. Its tensors belong to the model afterwards.

    Raises:
        Exception: Whatever ``make``, ``read_state_dict`` or the model's ``load_state_dict`` raise.
    """
    deferred = DeferredInitialisation()
    try:
        with deferred:
            model = make()
            loadable = model.state_dict(keep_vars=True)
        deferred.catch_up_unless_in(loadable)
        del loadable
    except Exception:  # foreign code, which fails again where that is its own doing
        logger.debug("The model is built again, with its initialisations.", exc_info=True)
        deferred = DeferredInitialisation()
        model = make()
    state_dict = read_state_dict()
    with deferred, _Adoption(deferred):
        model.load_state_dict(state_dict)
    deferred.catch_up()
    return model


class DeferredInitialisation(TorchFunctionMode):
    """While it is entered, initialisations of tensors on the CPU are noted instead of run.

    They run, in their order, before anything that could tell the difference: all that is not known
    to look at no weight. Random numbers are those that would have been drawn, too: a model may
    draw some that it keeps, or seed the generator.
    """

    def __init__(self) -> None:
        super().__init__()
        #: What was noted, by the memory it fills, with its turn. Strong references keep the memory.
        self._noted: dict[int, list[tuple[int, Callable[[], Any]]]] = {}
        self._turn = 0
        #: Of the random generator when the first draw was noted; None while there is none.
        self._random_state: torch.Tensor | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Note, let pass, or catch up first: called by torch instead of ``func``."""
        del types
        kwargs = kwargs or {}
        if _is_initialisation(func, args, kwargs):
            return self._note(func, args, kwargs)
        if self._noted and not _is_harmless(func, args, kwargs):
            self.catch_up()
        return func(*args, **kwargs)

    def catch_up(self) -> None:
        """Run what was noted."""
        noted, self._noted = self._noted, {}
        before, self._random_state = self._random_state, None
        now = torch.get_rng_state()
        with torch._C.DisableTorchFunction(), torch.no_grad():  # noqa: SLF001 - has no other name
            if before is not None:
                torch.set_rng_state(before)
            for _, run in sorted(itertools.chain(*noted.values()), key=itemgetter(0)):
                run()
            if before is not None and not torch.equal(before, now):  # seeded meanwhile
                torch.set_rng_state(now)

    def catch_up_unless_in(self, state_dict: Mapping[str, Any]) -> None:
        """Run what was noted unless all of it is for tensors that will be loaded."""
        tensors = (one for one in state_dict.values() if isinstance(one, torch.Tensor))
        if not self._noted.keys() <= {_memory_of(one) for one in tensors}:
            self.catch_up()

    def forget(self, target: torch.Tensor) -> None:
        """Drop what was noted for a tensor that is overwritten as a whole."""
        self._noted.pop(_memory_of(target), None)

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func not in _FILLS:
            self._note_random_state()
        target = _target(args, kwargs)
        self._turn += 1
        run = partial(func, *args, **kwargs)
        self._noted.setdefault(_memory_of(target), []).append((self._turn, run))
        return target

    def _note_random_state(self) -> None:
        now = torch.get_rng_state()
        if self._random_state is not None and not torch.equal(now, self._random_state):
            self.catch_up()
        if self._random_state is None:
            self._random_state = now


class _Adoption(TorchFunctionMode):
    """While it is entered, a tensor that is copied as a whole becomes the target's own.

    What is copied must belong to nobody else.
    """

    def __init__(self, deferred: DeferredInitialisation) -> None:
        super().__init__()
        self._deferred = deferred
        self._adopted: set[int] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Take over what is copied, or do as told: called by torch instead of ``func``."""
        del types
        if func == torch.Tensor.copy_:
            with torch._C.DisableTorchFunction():  # noqa: SLF001 - has no other name
                if _is_overwritten(*args[:2]):
                    return self._overwrite(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _overwrite(self, target: torch.Tensor, source: torch.Tensor, **options: Any) -> Any:
        self._deferred.forget(target)
        # Once only: two weights that share their memory in the file need not do so in the model.
        if source.data_ptr() in self._adopted or not _adopt(target, source):
            return target.copy_(source, **options)
        self._adopted.add(source.data_ptr())
        return target


def _adopt(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Give the memory of ``source`` to ``target``, unless somebody else looks at the old memory."""
    if not _is_alike(target, source):
        return False
    old = StorageWeakRef(target.untyped_storage())  # type: ignore[no-untyped-call]  # torch's
    shape, strides = target.shape, target.stride()
    target.data = source.detach()
    if old.expired():  # type: ignore[no-untyped-call]  # torch's
        return True
    memory = torch.UntypedStorage._new_with_weak_ptr(old.cdata)  # noqa: SLF001 - as torch shares it
    target.data = torch.empty(0, dtype=target.dtype).set_(memory, 0, shape, strides)
    return False


def _is_overwritten(target: Any, source: Any) -> bool:
    """Whether a copy leaves nothing of what the target's memory holds."""
    return (
        type(target) in _PLAIN_TENSORS
        and type(source) in _PLAIN_TENSORS
        and target.device.type == "cpu"
        and target.layout is torch.strided
        and target.shape == source.shape
        and target.numel() * target.element_size() == target.untyped_storage().nbytes()
    )


def _is_alike(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether a copy would be the same bytes in the same order."""
    return (
        source.device == target.device
        and source.dtype == target.dtype
        and source.layout == target.layout
        and source.stride() == target.stride()
        and not source.is_quantized
        and not source.is_neg()
        and not source.is_conj()
    )


def _is_initialisation(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if func not in _CHANGES and getattr(func, "__module__", None) != torch.nn.init.__name__:
        return False
    target = _target(args, kwargs)
    others = (*args[1:], *(value for key, value in kwargs.items() if key != "tensor"))
    return (
        type(target) in _PLAIN_TENSORS
        and target.device.type == "cpu"
        and target.layout is torch.strided
        and all(isinstance(one, _SCALARS) for one in others)
    )


def _is_harmless(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if "out" in kwargs:
        return False
    if func is torch.tensor:
        return isinstance(args[0], _SCALARS)
    if func == torch.Tensor.__getitem__:  # a row of an embedding, which is set to zero next
        return isinstance(args[1], int)
    return func in _HARMLESS or getattr(func, "__name__", "") == "__get__"  # of an attribute


def _target(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0] if args else kwargs.get("tensor")


def _memory_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
