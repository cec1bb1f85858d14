import contextlib
import gzip
import logging
import os
import shutil
import time
from pathlib import Path

import pytest

from marserve.frontend.logs.files import LogFile, Rollover, daily

NOON = time.mktime((2026, 11, 20, 12, 0, 0, 0, 0, -1))
DAY = 24 * 3600.0
MIDNIGHT = NOON + DAY / 2


@pytest.fixture
def path(tmp_path):
    """A file whose last line is of 20 November."""
    path = tmp_path / "ts_log.log"
    path.write_text("old\n")
    os.utime(path, (NOON, NOON))
    return path


@pytest.fixture
def open_file(path):
    opened = []

    def make(**options):
        opened.append(LogFile(path, daily(path, **options)))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


def write(file: LogFile, text: str, now: float) -> None:
    record = logging.LogRecord("n", logging.INFO, "p", 1, "%s", (text,), None)
    record.created = now
    file.handle(record)


def old(path: Path) -> dict[str, str]:
    """Return the old files with their text."""
    found = [each for each in path.parent.iterdir() if each != path]
    assert all(each.suffix == ".gz" for each in found)
    return {each.name: gzip.decompress(each.read_bytes()).decode() for each in found}


def test_lines_are_added(open_file, path):
    file = open_file()
    write(file, "gr\u00fc\u00dfe", NOON)
    write(file, "half \ud83d character", MIDNIGHT - 1)
    file.close()
    assert path.read_text() == "old\ngr\u00fc\u00dfe\nhalf \\ud83d character\n"
    assert old(path) == {}


def test_the_first_line_of_a_day_starts_a_file(open_file, path):
    file = open_file()
    write(file, "late", MIDNIGHT - 0.001)
    write(file, "early", MIDNIGHT)
    write(file, "later", MIDNIGHT + DAY - 1)
    write(file, "next", MIDNIGHT + DAY)
    file.close()
    assert path.read_text() == "next\n"
    assert old(path) == {
        "ts_log.20-Nov.log.gz": "old\nlate\n",
        "ts_log.21-Nov.log.gz": "early\nlater\n",
    }


def test_a_file_of_another_day_is_rolled_over_by_the_next_server(open_file, path):
    file = open_file()
    write(file, "new", NOON + 3 * DAY)
    file.close()
    assert path.read_text() == "new\n"
    assert old(path) == {"ts_log.20-Nov.log.gz": "old\n"}


def test_a_file_does_not_exceed_its_maximum(open_file, path):
    file = open_file(max_bytes=12)
    for text in ("12345", "12345"):
        write(file, text, NOON)
    file.close()
    assert path.read_text() == "12345\n"
    assert old(path) == {"ts_log.20-Nov.log.gz": "old\n12345\n"}


@pytest.mark.parametrize(
    ("most", "lines"), [(1, []), (7, []), (8, ["äöü"]), (12, ["äöü"]), (100, ["12345", "äöü"])]
)
def test_the_last_lines_are_read_without_a_part_of_a_line(open_file, path, most, lines):
    file = open_file()
    path.write_bytes(b"")
    for text in ("12345", "äöü"):
        write(file, text, NOON)
    assert file.tail(most) == lines


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["pipe", "link", "device"])
def test_the_last_lines_of_what_took_the_place_of_the_file_are_not_read(open_file, path, kind):
    file = open_file()
    secret = path.with_name("secret")
    secret.write_text("a secret\n")
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(secret if kind == "link" else "/dev/zero")
    with pytest.raises(OSError, match=r"is no file|symbolic links"):
        file.tail(100)


def test_a_full_file_is_rolled_over_without_overwriting(open_file, path):
    file = open_file(max_bytes=10)
    for text in ("12345", "123456789012345", "1", "2"):
        write(file, text, NOON)
    file.close()
    assert path.read_text() == "1\n2\n"
    assert old(path) == {
        "ts_log.20-Nov.log.gz": "old\n12345\n",
        "ts_log.20-Nov.2.log.gz": "123456789012345\n",
    }


def test_the_newest_old_files_are_kept_and_no_other_file_is_removed(open_file, path):
    bystanders = {"ts_log.log.1", "ts_log.20-Nov.txt", "ts_logs.20-Nov.log.gz", "a.20-Nov.log"}
    for name in bystanders:
        path.with_name(name).write_text("mine")
    file = open_file(max_bytes=1, old_files=2)
    for number in range(6):
        write(file, str(number), NOON + number * DAY)
    file.close()
    assert path.read_text() == "5\n"
    assert {each.name for each in path.parent.iterdir()} == bystanders | {
        "ts_log.log",
        "ts_log.23-Nov.log.gz",
        "ts_log.24-Nov.log.gz",
    }


def test_a_file_that_a_crash_left_is_compressed_by_the_next_server(open_file, path):
    path.with_name("ts_log.19-Nov.log").write_text("left")
    path.with_name("ts_log.19-Nov.part").write_text("half")
    open_file().close()
    assert old(path) == {"ts_log.19-Nov.log.gz": "left"}


def test_after_a_rollover_that_fails_the_old_file_is_used(open_file, path, capsys):
    file = open_file(max_bytes=5)
    path.rename(path.with_name("taken"))  # by another program
    for text in ("a", "b", "c"):
        write(file, text, NOON)
    file.close()
    assert path.with_name("taken").read_text() == "old\na\nb\nc\n"
    assert capsys.readouterr().err.count("\n") == 1


def test_a_full_disk_is_reported_once(capsys):
    file = LogFile("/dev/full")
    for _ in range(3):
        write(file, "x", time.time())
    file.close()
    assert capsys.readouterr().err.count("/dev/full") == 1


def test_a_full_disk_with_standard_error_on_it_raises_nothing(monkeypatch):
    with open("/dev/full", "w", buffering=1) as full:  # noqa: PTH123 - as standard error is
        monkeypatch.setattr("sys.stderr", full)
        file = LogFile("/dev/full", daily(Path("/dev/full")))
        write(file, "lost", NOON)
        file.close()
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            full.close()


def test_a_file_that_cannot_be_opened_is_an_error(tmp_path):
    (tmp_path / "taken").touch()
    with pytest.raises(OSError, match="taken"):
        LogFile(tmp_path / "taken" / "ts_log.log")


def test_reopen_creates_a_file_that_another_program_moved(open_file, path):
    file = open_file()
    moved = path.rename(path.with_suffix(".1"))
    write(file, "before", NOON)
    file.reopen()
    write(file, "after", NOON)
    assert moved.read_text() == "old\nbefore\n"
    assert path.read_text() == "after\n"


def test_a_removed_directory_is_made_again(tmp_path):
    path = tmp_path / "logs" / "ts_log.log"
    file = LogFile(path)
    shutil.rmtree(path.parent)
    file.reopen()
    write(file, "reopened", NOON)
    assert path.read_text() == "reopened\n"
    file.close()


@pytest.mark.timeout(20)
@pytest.mark.parametrize("has_reader", [False, True])
def test_reopen_keeps_the_old_file_if_a_pipe_took_its_place(open_file, path, has_reader):
    file = open_file()
    moved = path.rename(path.with_suffix(".1"))
    os.mkfifo(path)
    with contextlib.ExitStack() as opened:
        if has_reader:
            opened.callback(os.close, os.open(path, os.O_RDONLY | os.O_NONBLOCK))
        with pytest.raises(OSError, match=r"is no file|No such device"):
            file.reopen()
        write(file, "still", NOON)
    assert moved.read_text() == "old\nstill\n"


@pytest.mark.timeout(20)
def test_a_pipe_without_a_reader_is_an_error(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="No such device"):
        LogFile(tmp_path / "pipe")


def test_a_pipe_is_not_rolled_over(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as reader:
        file = LogFile(path, daily(path, max_bytes=10))
        for text in ("1234567", "12345678"):
            write(file, text, NOON)
        file.close()
        assert reader.read() == b"1234567\n12345678\n"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.timeout(20)
def test_a_pipe_in_place_of_the_compressed_file_does_not_hold_the_end(open_file, path):
    os.mkfifo(path.with_name("ts_log.20-Nov.part"))
    file = open_file()
    write(file, "new", MIDNIGHT + 1)
    file.close()
    assert old(path) == {"ts_log.20-Nov.log.gz": "old\n"}


def test_reopen_keeps_the_old_file_if_it_fails(open_file, path):
    file = open_file()
    moved = path.rename(path.with_suffix(".1"))
    path.mkdir()
    with pytest.raises(IsADirectoryError):
        file.reopen()
    write(file, "still", NOON)
    assert moved.read_text() == "old\nstill\n"
    path.rmdir()


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
        ("a.%d{HHmm}.log", "a.1200.log", "a.1200.2.log", local(2026, 11, 20, 12, 1)),
        ("a.%d{MM-dd-KK}.log", "a.11-20-00.log", "a.11-20-00.2.log", local(2026, 11, 20, 13)),
        ("a.log.%i", "a.log.1", "a.log.2", float("inf")),
    ],
)  # fmt: skip
def test_names_and_periods_come_from_the_pattern(pattern, first, second, turn, tmp_path):
    rollover = Rollover(f"{tmp_path}/{pattern}")
    name = rollover.new_name(NOON)
    assert name == tmp_path / first
    name.parent.mkdir(exist_ok=True)
    name.touch()
    assert rollover.new_name(NOON) == tmp_path / second
    assert rollover.next_time(NOON) == turn
    assert list(rollover.find()) == [name]


def test_the_interval_is_a_number_of_periods_or_none():
    assert Rollover("a.%d{HH}.log", interval=3).next_time(NOON) == local(2026, 11, 20, 15)
    assert Rollover("a.%d{HH}.log", interval=0).next_time(NOON) == float("inf")


@pytest.mark.parametrize("pattern", ["a.%d{b}.log", "a.%d{'}.log"])
def test_a_date_that_cannot_be_read_is_refused(pattern):
    with pytest.raises(ValueError, match="date pattern"):
        Rollover(pattern)


def test_old_files_are_kept_as_they_are_and_removed_when_they_are_too_many(tmp_path):
    path, bystander = tmp_path / "app.log", tmp_path / "app-notes.log"
    bystander.touch()
    file = LogFile(path, Rollover(f"{tmp_path}/app-%i.log", 1, 0, 2))
    for number in range(5):
        write(file, str(number), NOON + number)
        os.utime(path, (NOON + number, NOON + number))
    file.close()
    found = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert found == {
        "app.log": "4\n",
        "app-3.log": "2\n",
        "app-4.log": "3\n",
        "app-notes.log": "",
    }


def test_folders_of_old_files_are_made(tmp_path):
    rollover = Rollover(f"{tmp_path}/%d{{yyyy-MM}}/a-%i.log.gz", 1, 0, None)
    file = LogFile(tmp_path / "a.log", rollover)
    for text in "ab":
        write(file, text, NOON)
    file.close()
    (old_file,) = tmp_path.glob("*/*")
    assert gzip.decompress(old_file.read_bytes()) == b"a\n"


@pytest.mark.parametrize(
    ("name", "pattern"), [("a.log", "a.log.gz"), ("a.log", "a.log"), ("7.log", "%i.log")]
)
def test_the_present_file_is_not_removed_as_an_old_one(name, pattern, tmp_path):
    file = LogFile(tmp_path / name, Rollover(f"{tmp_path}/{pattern}", 1, 0, 1))
    for text in "123":
        write(file, text, NOON)
    file.close()
    assert (tmp_path / name).read_text() == "3\n"
    assert len(list(tmp_path.iterdir())) == 2
