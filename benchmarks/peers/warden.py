"""Runs a command until standard input ends, then ends it and everything that came of it.

    python warden.py GRACE_SECONDS COMMAND...

Standard input is a pipe that the benchmark holds, so whatever becomes of the benchmark (Ctrl-C,
an error, ``kill -9``), the peer stops. Signals to a process group would not reach what peers start
in sessions of their own, and PR_SET_PDEATHSIG is not inherited; a subreaper keeps all of them in
its family. If the command ends first, what it left behind goes too, and its exit status is passed
on.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence

import psutil

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def main(grace: float, command: Sequence[str]) -> int:
    """Run the command; its exit status."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    ended = os.pidfd_open(child.pid)
    select.select([sys.stdin, ended], [], [])
    _send(signal.SIGCONT)
    child.terminate()
    select.select([ended], [], [], grace)
    _send(signal.SIGKILL)
    status = child.wait()  # before anybody is buried: else it is lost
    while _family():  # one that was being started just then
        _send(signal.SIGKILL)
        _bury()
    return status


def _family() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def _send(number: int) -> None:
    for one in _family():
        try:
            one.send_signal(number)
        except psutil.NoSuchProcess:
            continue


def _bury() -> None:
    try:
        os.waitpid(-1, 0)
    except ChildProcessError:
        return


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
