"""What a forked worker must not share: random numbers, and modules of an archive's names."""

import os
import signal

import pytest

pytestmark = pytest.mark.integration

# The state is that at the import, before anything draws from it.
DRAWS = """
import json, multiprocessing, os, random
import numpy, sympy.core.random, torch
import generator_of_a_library

DRAWN = {
    "numpy": numpy.random.rand(),
    "numpy's new generator": generator_of_a_library.new.random(),
    "torch": torch.rand(1).item(),
    "torch's seed": torch.initial_seed(),
    "python": random.random(),
    "sympy": sympy.core.random.rng.random(),
    "a library": generator_of_a_library.own.random(),
    "multiprocessing": multiprocessing.current_process().authkey.hex(),
}

def handle(data, context):
    return data and [json.dumps([os.getpid(), DRAWN])] * len(data)
"""
LIBRARY = """
import random
import numpy

own = random.Random()
new = numpy.random.default_rng()
"""


@pytest.fixture(scope="module")
def server(prepare_server, tmp_path_factory):
    pytest.importorskip("torchvision")
    folder = tmp_path_factory.mktemp("library")
    (folder / "generator_of_a_library.py").write_text(LIBRARY)
    preloaded = "torch,torchvision,sympy,generator_of_a_library"
    with prepare_server({"PYTHONPATH": str(folder)}, preload_modules=preloaded) as server:
        server.start()
        yield server


def test_no_worker_draws_the_random_numbers_of_another(server, wait_for):
    server.install(DRAWS, "one")
    server.install(DRAWS, "two")
    pid, first = server.predict("one", data=b"1").json()
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: server.worker("one")["pid"] not in (0, None, pid))
    server.wait_workers("one", "READY")
    _, successor = server.predict("one", data=b"1").json()
    _, other = server.predict("two", data=b"1").json()
    for name in first:
        assert len({first[name], successor[name], other[name]}) == 3, name
