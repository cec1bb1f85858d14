import logging
from collections.abc import Callable
from typing import Any

import fakes
import pytest

from marserve.frontend.rest.loggers import logger_routes

CHILD = "marserve.frontend.loggers_test"
Ask = Callable[[str, str], Any]


@pytest.fixture(autouse=True)
def levels():
    """Levels are as before when the test is over."""
    loggers = [logging.getLogger(name) for name in ("", "marserve", CHILD, "MODEL_LOG")]
    before = [(logger, logger.level) for logger in loggers]
    logging.getLogger("marserve").setLevel(logging.INFO)
    yield
    for logger, level in before:
        logger.setLevel(level)


@pytest.fixture
def ask():
    """Ask the management listener."""
    return lambda method, target: fakes.exchange(logger_routes(), fakes.request(target, method))


def test_the_loggers_are_listed(ask):
    answer = ask("GET", "/loggers")
    assert answer.status == 200
    listed = {item["name"]: item["level"] for item in answer.document["loggers"]}
    assert {"root", "MODEL_LOG", "ACCESS_LOG", "TS_METRICS", "MODEL_METRICS"} <= listed.keys()
    assert listed["marserve"] == listed[CHILD] == "info"


@pytest.mark.parametrize(
    ("name", "word", "level"),
    [
        ("root", "error", "error"),
        ("MODEL_LOG", "OFF", "off"),
        ("marserve", "Warning", "warn"),
        (CHILD, "trace", "debug"),
        (CHILD, "inherit", "info"),
    ],
)
def test_a_level_is_changed_and_seen(name, word, level, ask):
    logging.getLogger(CHILD).setLevel(logging.ERROR)
    expected = {"name": name, "level": level}
    assert ask("PUT", f"/loggers/{name}?level={word}").document == expected
    assert ask("GET", f"/loggers/{name}").document == expected


@pytest.mark.parametrize(
    ("method", "target", "status", "word"),
    [
        ("PUT", "/loggers/root?level=loud", 400, "fatal"),
        ("PUT", "/loggers/root?level=inherit", 400, "fatal"),
        ("PUT", "/loggers/marserve?level=10", 400, "inherit"),
        ("PUT", "/loggers/marserve?level=", 400, "debug"),
        ("PUT", "/loggers/marserve", 400, "debug"),
        ("PUT", "/loggers/nobody?level=info", 404, "nobody"),
        ("GET", "/loggers/aiohttp.access", 404, "aiohttp.access"),
        ("PUT", "/loggers?level=info", 405, "method"),
        ("POST", "/loggers/root?level=info", 405, "method"),
        ("DELETE", "/loggers/root", 405, "method"),
        ("GET", "/loggers/root/more", 404, "not found"),
    ],
)
def test_what_cannot_be_done_is_refused(method, target, status, word, ask):
    answer = ask(method, target)
    assert answer.status == status
    assert word in answer.document["message"]
    assert logging.getLogger("marserve").level == logging.INFO


def test_it_is_behind_the_key_of_management():
    (route,) = logger_routes().values()
    assert route.key == "management"
