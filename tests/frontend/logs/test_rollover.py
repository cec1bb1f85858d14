import gzip
import logging
import os
import time
from pathlib import Path

import pytest

from marserve.frontend.logs.files import LogFile, Rollover

NOON = time.mktime((2026, 11, 20, 12, 30, 5, 0, 0, -1))


def local(*parts: int) -> float:
    return time.mktime((*parts, *[0] * (8 - len(parts)), -1))


@pytest.mark.parametrize(
    ("pattern", "first", "second", "turn"),
    [
        ("a.%d{dd-MMM}.log.gz", "a.20-Nov.log", "a.20-Nov.2.log", local(2026, 11, 21)),
        ("a-%d{yyyy-MM-dd-HH}-%i.log", "a-2026-11-20-12-1.log", "a-2026-11-20-12-2.log",
         local(2026, 11, 20, 13)),
        ("%d{yyyy-MM}/a.%03i.log", "2026-11/a.001.log", "2026-11/a.002.log", local(2026, 12, 1)),
        ("a.%d{yyyy}.log", "a.2026.log", "a.2026.2.log", local(2027, 1, 1)),
        ("a.%d{yyyy-ww}.log", "a.2026-47.log", "a.2026-47.2.log", local(2026, 11, 23)),
        ("a.%d{HHmm}.log", "a.1230.log", "a.1230.2.log", local(2026, 11, 20, 12, 31)),
        ("a.%d{MM-dd-KK}.log", "a.11-20-00.log", "a.11-20-00.2.log", local(2026, 11, 20, 13)),
        ("a.log.%i", "a.log.1", "a.log.2", float("inf")),
    ],
)  # fmt: skip
def test_names_and_periods_come_from_the_pattern(
    pattern: str, first: str, second: str, turn: float, tmp_path: Path
) -> None:
    rollover = Rollover(f"{tmp_path}/{pattern}")
    name = rollover.new_name(NOON)
    assert name == tmp_path / first
    name.parent.mkdir(exist_ok=True)
    name.touch()
    assert rollover.new_name(NOON) == tmp_path / second
    assert rollover.next_time(NOON) == turn
    assert list(rollover.find()) == [name]


def test_the_interval_is_a_number_of_periods_or_none() -> None:
    assert Rollover("a.%d{HH}.log", interval=3).next_time(NOON) == local(2026, 11, 20, 15)
    assert Rollover("a.%d{HH}.log", interval=0).next_time(NOON) == float("inf")


@pytest.mark.parametrize("pattern", ["a.%d{b}.log", "a.%d{'}.log"])
def test_a_date_that_cannot_be_read_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="date pattern"):
        Rollover(pattern)


def test_old_files_are_kept_as_they_are_and_removed_when_they_are_too_many(tmp_path: Path) -> None:
    path, bystander = tmp_path / "app.log", tmp_path / "app-notes.log"
    bystander.touch()
    file = LogFile(path, Rollover(f"{tmp_path}/app-%i.log", 1, 0, 2))
    for number in range(5):
        made = logging.LogRecord("n", logging.INFO, "p", 1, "%s", (str(number),), None)
        made.created = NOON + number
        file.handle(made)
        os.utime(path, (NOON + number, NOON + number))
    file.close()
    found = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert found == {
        "app.log": "4\n",
        "app-3.log": "2\n",
        "app-4.log": "3\n",
        "app-notes.log": "",
    }


def test_folders_of_old_files_are_made(tmp_path: Path) -> None:
    file = LogFile(
        tmp_path / "a.log", Rollover(f"{tmp_path}/%d{{yyyy-MM}}/a-%i.log.gz", 1, 0, None)
    )
    for text in "ab":
        made = logging.LogRecord("n", logging.INFO, "p", 1, text, (), None)
        made.created = NOON
        file.handle(made)
    file.close()
    (old,) = tmp_path.glob("*/*")
    assert gzip.decompress(old.read_bytes()) == b"a\n"
