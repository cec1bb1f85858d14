"""Arrays of numpy and tensors of torch.

numpy is imported only if a handler asks for arrays; a value can only be an array or a tensor if the
handler has imported the library.
"""

import sys
from typing import Any

from marserve.backend.protocol import Buffer
from marserve.backend.tensors.datatypes import BF16, BYTES, NUMPY, UnusableTensor, read_elements

# By kind and bytes of an item.
_DATATYPES = {dtype.lstrip("<"): name for name, dtype in NUMPY.items()}


def flat_array(datatype: str, buffer: Buffer) -> Any:
    """Return a buffer as a flat array: BF16 as FP32, BYTES as bytes, all others as a view."""
    import numpy as np

    if datatype == BYTES:
        return np.array([*read_elements(buffer), None], object)[:-1]
    if datatype == BF16:
        return widened(np.frombuffer(buffer, "<u2"))
    return np.frombuffer(buffer, NUMPY[datatype])


def widened(halves: Any) -> Any:
    """Return an array of BF16, as any integers of two bytes, as FP32."""
    return (halves.view("<u2").astype("<u4") << 16).view("<f4")


def rounded(array: Any) -> Any:
    """Return an array as BF16 in integers of two bytes, rounded to nearest, ties to even."""
    wide = array.astype("<f4").view("<u4")
    return ((wide + 0x7FFF + (wide >> 16 & 1)) >> 16).astype("<u2").view("<i2")


def is_tensor(value: Any) -> bool:
    """Whether a value is a tensor of torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_array(value: Any) -> bool:
    """Whether a value is an array of numpy, one of its scalars, or a tensor of torch."""
    numpy = sys.modules.get("numpy")
    return is_tensor(value) or (
        numpy is not None and isinstance(value, numpy.ndarray | numpy.generic)
    )


def moved(array: Any, source: int, destination: int) -> Any:
    """Return a view of an array with a dimension at another position."""
    if source == destination:
        return array
    if is_tensor(array):
        return array.movedim(source, destination)
    return sys.modules["numpy"].moveaxis(array, source, destination)


def on_cpu(array: Any) -> Any:
    """Return an array, or a tensor without its gradient in the host's memory."""
    return array.detach().cpu() if is_tensor(array) else array


def array_parts(value: Any) -> tuple[str, list[int], bytes | list[Any]]:
    """Return the datatype, the shape, and the bytes of an array; of BYTES its values as a list."""
    value = on_cpu(value)
    if is_tensor(value):
        torch = sys.modules["torch"]
        if value.dtype == torch.bfloat16:  # numpy does not have it
            halves = value.contiguous().view(torch.int16).numpy()
            return BF16, list(value.shape), halves.astype("<i2", copy=False).tobytes()
        value = value.numpy()
    value = sys.modules["numpy"].asarray(value)
    shape, kind = list(value.shape), value.dtype.kind
    if kind in "OSU":
        return BYTES, shape, value.flatten().tolist()
    datatype = _DATATYPES.get(f"{kind}{value.dtype.itemsize}")
    if datatype is None:
        raise UnusableTensor(f"is an array of {value.dtype}, which the protocol does not have")
    return datatype, shape, value.astype(value.dtype.newbyteorder("<"), copy=False).tobytes()
