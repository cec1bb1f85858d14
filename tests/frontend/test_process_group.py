"""Signals to processes, with pidfds and in sandboxes without."""

import errno
import os
import signal
import subprocess
import sys

import pytest

from marserve.frontend.process_group import ProcessHandle, ancestors


@pytest.fixture
def child():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process


@pytest.mark.parametrize("has_pidfds", [True, False])
def test_a_zombie_has_ended(child, monkeypatch, has_pidfds):
    def refuse(_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    if not has_pidfds:
        monkeypatch.setattr(os, "pidfd_open", refuse)
    handle = ProcessHandle(child.pid)
    assert not handle.has_ended_within(0)
    assert handle.send(signal.SIGKILL)
    assert handle.has_ended_within(60)  # it is not reaped yet
    handle.close()


def test_the_ancestors_of_a_process(child):
    assert next(ancestors(child.pid)) == os.getpid()
    assert list(ancestors(2**22)) == []
