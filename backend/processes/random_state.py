"""Random state that libraries draw at their import, and that a fork inherits.

Every worker would draw the same numbers. Python seeds the functions of ``random`` after a fork by
itself; generators of CUDA are made in the worker, and ``tempfile``, ``uuid`` and OpenSSL notice the
fork. What is left is seeded here: numpy's functions (``numpy.random.rand``), torch's generator of
the CPU, and the generators of libraries such as ``sympy.core.random.rng``. A seed that a preloaded
module sets at its import is lost: each process draws its own numbers.
"""

import multiprocessing
import os
import random
import sys
from collections.abc import Iterable, Sequence
from typing import Any


def find_generators(objects: Iterable[Any]) -> Sequence[Any]:
    """Return the generators of random numbers among objects, except for those of the system."""
    numpy: Any = sys.modules.get("numpy.random")
    kinds: tuple[Any, ...] = (random.Random,)
    if numpy is not None:
        kinds += (numpy.RandomState, numpy.Generator)
    found = [each for each in objects if issubclass(type(each), kinds)]
    return [each for each in found if not isinstance(each, random.SystemRandom)]


def seed(generators: Iterable[Any]) -> None:
    """Seed generators, torch's of the CPU, and the key of multiprocessing from the system."""
    for each in generators:
        if hasattr(each, "bit_generator"):  # numpy's Generator, which cannot be seeded again
            each.bit_generator.state = type(each.bit_generator)().state
        else:
            each.seed()
    if torch := sys.modules.get("torch"):
        torch.default_generator.seed()
    multiprocessing.current_process().authkey = os.urandom(32)
