"""Tiers of tests, and fixtures of the unit tests: virtual time, fake workers, a configuration."""

import gc
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import fakes
import hypothesis
import pytest

from marserve.frontend.configuration.config import Config

pytest_plugins = [
    "servers",
    "client_environment",
]  # the fixtures around real servers; setup.cfg puts tests/ on the path

# `nohup`, and a shell for a command with "&", ignore signals. Children inherit that, and servers
# would ignore the signals of the tests.
for _number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
    if signal.getsignal(_number) is signal.SIG_IGN:
        is_interrupt = _number == signal.SIGINT  # after which pytest prints its summary
        signal.signal(_number, signal.default_int_handler if is_interrupt else signal.SIG_DFL)

# An interpreter that writes no bytecode compiles the server at each start, which takes 1.3 of 3 s.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# No deadline: a busy machine is not a defect of the code. The same examples in each run: a change
# of other code must not fail by new ones. `--hypothesis-profile random` takes others.
hypothesis.settings.register_profile("unit", deadline=None, max_examples=50, derandomize=True)
hypothesis.settings.register_profile("random", deadline=None, max_examples=500)
hypothesis.settings.load_profile("unit")

# A fixed seed, for the same reason; `make chaos` takes random ones.
_CHAOS_SEED = 13

_SESSION = "MARSERVE_TEST_SESSION"


# Tests with none of these markers are quick. The slowest run first, so that both processes of
# pytest-xdist end at about the same time.
_SLOW = (
    "chaos",
    "release",
    "site",
    "simulation",
    "containers",
    "environments",
    "fuzz",
    "integration",
    "llm",
)


def pytest_configure(config: pytest.Config) -> None:
    """Keep the order of `pytest_collection_modifyitems` in processes of pytest-xdist."""
    config.option.loadscopereorder = False
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.add_cleanup(_start_guard())


def _start_guard() -> Callable[[], object]:
    """Start a guard that kills this process's servers when it ends; return what ends the guard."""
    session = uuid.uuid4().hex
    guard = subprocess.Popen(
        [sys.executable, Path(__file__).with_name("session_guard.py"), f"{_SESSION}={session}"],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    os.environ[_SESSION] = session  # not of the guard
    return guard.communicate


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the quick tests, and put the slowest first."""

    def rank(item: pytest.Item) -> int:
        found = [at for at, name in enumerate(_SLOW) if item.get_closest_marker(name)]
        return min(found, default=len(_SLOW))

    for item in items:
        if rank(item) == len(_SLOW):
            item.add_marker("quick")
        if item.get_closest_marker("environments"):
            item.add_marker(pytest.mark.timeout(900))  # pip downloads packages
    items.sort(key=rank)


def pytest_collection_finish() -> None:
    """Freeze modules and collected tests, so that `gc.collect()` in a test does not visit them."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    """Escape surrogates in a report, because pytest-xdist cannot send them."""
    return _without_surrogates((yield))


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {key: _without_surrogates(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_without_surrogates, value))
    return value


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the chaos campaign; pytest reads them from this file only."""
    chaos = parser.getgroup("chaos")
    chaos.addoption(
        "--chaos-seed",
        type=int,
        default=_CHAOS_SEED,
        help=f"repeats a run's actions; {_CHAOS_SEED} by default, 0 for a random one",
    )
    chaos.addoption("--chaos-seconds", type=float, default=45.0, help="how long things go wrong")


@pytest.fixture
def loop(monkeypatch):
    """Return an event loop that never sleeps; `time.monotonic` returns its time."""
    with_virtual_time = fakes.VirtualLoop()
    monkeypatch.setattr(time, "monotonic", with_virtual_time.time)
    yield with_virtual_time
    with_virtual_time.close()


@pytest.fixture
def run(loop):
    """Run a coroutine in virtual time; no task may be left."""
    return loop.run


@pytest.fixture
def config(tmp_path):
    """Return the default configuration."""
    return Config(model_store=tmp_path)
