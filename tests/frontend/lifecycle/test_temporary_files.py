"""The times of a server's temporary files, by which cleaners go."""

import os
from pathlib import Path

import pytest

from marserve.frontend.lifecycle.temporary_files import TemporaryFiles
from marserve.frontend.lifecycle.workdir import own_workdir

LONG_AGO = 1_000_000_000


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.setenv("TEMP", str(tmp_path))
    with own_workdir() as own:
        (own.path / "models" / "m").mkdir(parents=True)
        (own.path / "models" / "m" / "handler.py").touch()
        (own.path / "models" / "link").symlink_to(tmp_path)
        yield own


def paths_in(root: Path) -> list[Path]:
    return [root, *root.rglob("*")]


def are_old(root: Path) -> set[bool]:
    times = [path.lstat() for path in paths_in(root)]
    return {status.st_mtime == LONG_AGO or status.st_atime == LONG_AGO for status in times}


def age(*paths: Path) -> None:
    for path in paths:
        os.utime(path, (LONG_AGO, LONG_AGO), follow_symlinks=False)


def test_all_files_are_touched_each_hour(directory, tmp_path):
    now = 0.0
    socket = tmp_path / "socket"
    socket.touch()
    files = TemporaryFiles(directory, lambda: None, [socket], clock=lambda: now)
    age(*paths_in(directory.path), socket)
    files.keep()
    assert are_old(directory.path) | are_old(socket) == {False}
    age(*paths_in(directory.path))
    now = 1800.0
    files.keep()
    assert are_old(directory.path) == {True}
    now = 3600.0
    files.keep()
    assert are_old(directory.path) == {False}


def test_a_link_is_touched_and_not_what_it_leads_to(directory, tmp_path):
    age(tmp_path)
    TemporaryFiles(directory, lambda: None).keep()
    assert tmp_path.stat().st_mtime == LONG_AGO


def test_a_file_that_cannot_be_made_again_is_reported_once(directory, caplog):
    def fail():
        raise PermissionError(13, "Permission denied", "/there/.model_server.pid")

    files = TemporaryFiles(directory, fail)
    for _ in range(2):
        files.keep()
    assert caplog.text.count("/there/.model_server.pid") == 1
