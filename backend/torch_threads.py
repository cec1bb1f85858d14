"""The threads that torch computes with in this process, whether or not it is loaded yet."""

import os
import sys

from marserve.backend.protocol import Reply, SetThreads

_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # read when the libraries load
# Loaded when torch generates code for a model, and not before (2.4 to 2.15).
_COMPILER = "torch._inductor.compile_fx"


def set_threads(count: int) -> None:
    """Have torch compute with so many threads; 0 leaves it as it is."""
    if not count:
        return
    for name in _VARIABLES:
        os.environ.setdefault(name, str(count))
    torch = sys.modules.get("torch")  # loaded already in a child of the fork server
    if torch is not None:
        torch.set_num_threads(count)


def change_threads(told: SetThreads) -> Reply:
    """Change the number of threads of a model that is loaded, if it is still what it was.

    A handler that has set it decides. Code that was compiled is for as many threads as there were
    then: with others torch would compile it again, at the next batch.
    """
    if threads_in_use() == told.before and not has_compiled():
        sys.modules["torch"].set_num_threads(told.count)
    return Reply(threads=[threads_in_use(), ""])


def threads_in_use() -> int:
    """How many threads torch computes with; 0 if it is not loaded."""
    torch = sys.modules.get("torch")
    ask = getattr(torch, "get_num_threads", None)  # it may be loading, or somebody else's
    return int(ask()) if ask is not None else 0


def has_compiled() -> bool:
    """Whether torch has generated code in this process, or is about to."""
    return _COMPILER in sys.modules
