import asyncio
import json
import logging
import re
from collections.abc import Callable
from typing import Any

import pytest

from marserve.frontend.telemetry.access_log import AccessLog
from marserve.frontend.telemetry.metrics import Metrics


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.INFO, logger="ACCESS_LOG")
    return lambda: [
        line
        for record in caplog.records
        if record.name == "ACCESS_LOG"
        for line in record.getMessage().split("\n")
    ]


def add(log: AccessLog, target: str = "/ping") -> None:
    log.add("127.0.0.1:5000", "GET", target, 200, 0.0126)


def test_a_line_has_the_format_of_torchserve(loop: Any, lines: Callable[[], list[str]]) -> None:
    log = AccessLog(loop, Metrics("host"))
    add(log, "/predictions/m?x=1")
    log.flush()
    [line] = lines()
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d,\d{3} - "
        r'/127\.0\.0\.1:5000 "GET /predictions/m\?x=1 HTTP/1\.1" 200 13',
        line,
    )


def test_a_line_can_be_json(loop: Any, lines: Callable[[], list[str]]) -> None:
    log = AccessLog(loop, Metrics("host"), as_json=True)
    add(log, '/x"\u2028')
    log.flush()
    [line] = lines()
    members = json.loads(line)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d,\d{3}", members.pop("time"))
    assert members == {
        "peer": "127.0.0.1:5000",
        "method": "GET",
        "path": '/x"\u2028',
        "status": 200,
        "milliseconds": 13,
    }


def test_lines_are_collected_for_half_a_second(loop: Any, lines: Callable[[], list[str]]) -> None:
    log = AccessLog(loop, Metrics("host"))
    add(log)
    loop.run_until_complete(asyncio.sleep(0.4))
    add(log)
    assert lines() == []
    loop.run_until_complete(asyncio.sleep(0.11))
    assert len(lines()) == 2
    add(log)
    loop.run_until_complete(asyncio.sleep(0.6))
    assert len(lines()) == 3


def test_a_full_buffer_is_written_without_delay(loop: Any, lines: Callable[[], list[str]]) -> None:
    log = AccessLog(loop, Metrics("host"))
    for _ in range(256):
        add(log)
    assert len(lines()) == 256


@pytest.mark.parametrize("target", ["/a\x1b[31m", "/a\u2028b", "/a\udcff", "/a\x00"])
def test_control_characters_are_escaped_in_the_log(
    target: str, loop: Any, lines: Callable[[], list[str]]
) -> None:
    log = AccessLog(loop, Metrics("host"))
    add(log, target)
    log.flush()
    [line] = lines()
    assert line.isprintable()
    assert "/a" in line


def test_nothing_is_written_when_the_level_is_off(
    loop: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="ACCESS_LOG")
    log = AccessLog(loop, Metrics("host"))
    add(log)
    log.flush()
    log.flush()
    assert caplog.records == []
