"""The threads that torch computes with in this process, whether or not it is loaded yet."""

import os
import sys

_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # read when the libraries load


def set_threads(count: int) -> None:
    """Have torch compute with so many threads; 0 leaves it as it is."""
    if not count:
        return
    for name in _VARIABLES:
        os.environ.setdefault(name, str(count))
    torch = sys.modules.get("torch")  # loaded already in a child of the fork server
    if torch is not None:
        torch.set_num_threads(count)


def threads_in_use() -> int:
    """How many threads torch computes with; 0 if it is not loaded."""
    torch = sys.modules.get("torch")
    ask = getattr(torch, "get_num_threads", None)  # it may be loading, or somebody else's
    return int(ask()) if ask is not None else 0
