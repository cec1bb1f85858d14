import datetime as dt
import logging
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import pytest

from marserve.frontend.logs.dates import date_format
from marserve.frontend.logs.patterns import PatternFormatter

NOON = time.mktime((2026, 11, 20, 12, 0, 5, 0, 0, -1)) + 0.042


@dataclass
class Entry:
    at: float
    text: str
    members: dict[str, Any] = field(default_factory=dict)


def record(message: str = "hello", **more: Any) -> logging.LogRecord:
    made = logging.LogRecord(
        "marserve.frontend.server", logging.WARNING, "/a/server.py", 7, message, (), None, "start"
    )
    made.created = NOON
    made.threadName = "MainThread"
    for name, value in more.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    ("pattern", "line"),
    [
        (
            "%d{ISO8601} [%-5p] %t %c - %m%n",
            "2026-11-20T12:00:05,042 [WARN ] main marserve.frontend.server - hello",
        ),
        ("%d %p %m", "2026-11-20 12:00:05,042 WARN hello"),
        ("%d{ABSOLUTE}|%date{yyyy/MM/dd'T'HH:mm:ss.SSS}", "12:00:05,042|2026/11/20T12:00:05.042"),
        ("%d{UNIX}", str(int(NOON))),
        ("%d{UNIX_MILLIS}", str(int(NOON * 1000))),
        ("[%6level] [%-6le] %.3p|%.-3p", "[  WARN] [WARN  ] ARN|WAR"),
        ("%c{1} %c{2} %logger{-1} %c{1.}", "server frontend.server frontend.server m.f.server"),
        ("%C %M %L %F %location", "marserve.frontend.server start 7 server.py "
         "marserve.frontend.server(server.py:7)"),
        ("%msg%% %message", "hello% hello"),
        ("%highlight{%-5level %m}{FATAL=red} %style{%m}{cyan}", "WARN  hello hello"),
        ("%enc{%m\"}{JSON} %replace{%m}{h(.)}{H$1} %maxLen{%m}{2}", 'hello\\" Hello he'),
        ("%p{WARN=W} %level{length=1} %p{lowerCase=true}", "W W warn"),
        ("%X{user}%marker[%x]", "[]"),
        ("%mfoo", "hellofoo"),
    ],
)  # fmt: skip
def test_a_record_is_formatted(pattern, line):
    formatter = PatternFormatter(pattern)
    assert formatter.format(record()) == line
    assert formatter.remarks == []


def test_the_thread_of_a_worker_is_its_name():
    made = record(worker="W-9000-m_1.0-stdout")
    assert PatternFormatter("%t %m").format(made) == "W-9000-m_1.0-stdout hello"


def test_a_time_zone_can_be_chosen():
    text = PatternFormatter("%d{HH:mm XXX}{Asia/Tokyo}").format(record())
    there = dt.datetime.fromtimestamp(NOON, dt.timezone(dt.timedelta(hours=9)))
    assert text == f"{there:%H:%M} +09:00"


@pytest.mark.parametrize(
    ("pattern", "text"), [("%m", "hello\nTrace"), ("%m%ex", "hello\nTrace"), ("%ex%m", "\nTrace")]
)
def test_an_exception_is_where_the_pattern_has_it_or_at_the_end(pattern, text):
    try:
        _ = 1 / 0
    except ZeroDivisionError:
        made = record(exc_info=sys.exc_info())
    assert PatternFormatter(pattern).format(made).startswith(text)
    assert PatternFormatter(pattern).format(made).count("ZeroDivisionError") == 1


def test_each_line_of_a_record_is_formatted_by_itself():
    made = record("finished lines", entries=[Entry(NOON - 1, "a"), Entry(NOON, "b")])
    text = PatternFormatter("%d{ss} %m%n").format(made)
    assert text == "04 a\n05 b"


@pytest.mark.parametrize(
    ("pattern", "line", "remark"),
    [
        ("%q %m", "%q hello", "%q"),
        ("%m %d{bbb}", "hello %d{bbb}", "'b'"),
        ("%d{'open}", "%d{'open}", "quote"),
        ("%d{HH}{Moon/Crater}", "%d{HH}{Moon/Crater}", "Moon"),
        ("%replace{%m}{(}{}", "%replace{%m}{(}{}", "cannot be used"),
        ("%replace{%m}{(h)}{$2}", "%replace{%m}{(h)}{$2}", "invalid group reference"),
        ("%99999m", "%99999m", "no counterpart"),
        (f"%d{{HH}}{{{'a' * 300}}}", f"%d{{HH}}{{{'a' * 300}}}", "cannot be used"),
        ("%m %", "hello %", "%"),
        ("%enc{%m}{ROT13}", "%enc{%m}{ROT13}", "ROT13"),
    ],
)
def test_an_unknown_conversion_stays_and_has_a_remark(pattern, line, remark):
    formatter = PatternFormatter(pattern)
    assert formatter.format(record()) == line
    (sentence,) = formatter.remarks
    assert remark in sentence


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("dd-MMM", "05-Mar"),
        ("EEE, d MMMM yy", "Thu, 5 March 26"),
        ("EEEE DDD h:mm a", "Thursday 064 9:07 PM"),
        ("yyyyMMdd'T'HHmmssSSSSSS", "20260305T210708012345"),
        ("HH 'o''clock'", "21 o'clock"),
        ("X XX XXX Z", "+05 +0530 +05:30 +0530"),
    ],
)  # fmt: skip
def test_dates_are_formatted_as_in_java(pattern, text):
    zone = dt.timezone(dt.timedelta(hours=5, minutes=30))
    moment = dt.datetime(2026, 3, 5, 21, 7, 8, 12345, zone)
    assert date_format(pattern)(moment) == text
