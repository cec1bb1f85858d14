"""Sets and reads the number of threads that torch computes with, whether or not it is loaded."""

import os
import sys

from marserve.backend.protocol import SetThreads, ThreadsSet

_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # read when the libraries load
# Loaded when torch generates code for a model (2.4 to 2.15).
_COMPILER = "torch._inductor.compile_fx"


def set_threads(count: int) -> None:
    """Set the number of threads; 0 changes nothing."""
    if not count:
        return
    for name in _VARIABLES:
        os.environ.setdefault(name, str(count))
    torch = sys.modules.get("torch")  # in a child of the fork server it is loaded
    if torch is not None:
        torch.set_num_threads(count)


def change_threads(change: SetThreads) -> ThreadsSet:
    """Change the number of threads of a loaded model, unless the handler has set another.

    Compiled code is for a number of threads: torch would compile it again at the next batch.
    """
    if threads_in_use() == change.before and not has_compiled():
        sys.modules["torch"].set_num_threads(change.count)
    return ThreadsSet(threads_in_use())


def threads_in_use() -> int:
    """Return the number of threads that torch computes with; 0 if it is not loaded."""
    torch = sys.modules.get("torch")
    get_num_threads = getattr(torch, "get_num_threads", None)  # it may be loading
    return int(get_num_threads()) if get_num_threads is not None else 0


def has_compiled() -> bool:
    """Whether torch has generated code in this process, or is about to."""
    return _COMPILER in sys.modules
