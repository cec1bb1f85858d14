import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from marserve.frontend.lifecycle.pidfile import PidFile, PidFileError

# Claims the file like a server, prints that, and lives until its input ends.
SERVER = """
import sys
from pathlib import Path
from marserve.frontend.lifecycle.pidfile import PidFile
pid_file = PidFile(Path(sys.argv[1]))
if len(sys.argv) > 2:
    pid_file.adopt(int(sys.argv[2]))
else:
    pid_file.claim()
print("claimed", flush=True)
sys.stdin.read()
pid_file.release()
"""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "server.pid"


@pytest.fixture
def server(path):
    with start_server(path) as process:
        yield process
        process.kill()


def start_server(path: Path, *descriptors: int) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(path), *map(str, descriptors)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=descriptors,
    )
    assert process.stdout
    assert process.stdout.readline() == "claimed\n"
    return process


def test_without_a_file_no_server_runs(path):
    assert PidFile(path).read() is None


def test_a_claimed_file_holds_the_pid_and_nothing_else(path):
    pid_file = PidFile(path)
    assert pid_file.claim() is False
    assert path.read_text() == str(os.getpid())
    assert path.stat().st_mode & 0o777 == 0o600
    pid_file.release()


def test_a_released_file_is_gone_and_may_be_claimed_again(path):
    pid_file = PidFile(path)
    for _ in range(2):
        pid_file.claim()
        pid_file.release()
        assert not path.exists()


def test_a_living_server_is_found_and_keeps_others_out(path, server):
    assert PidFile(path).read() == server.pid
    with pytest.raises(PidFileError, match="TorchServe is already running"):
        PidFile(path).claim()
    assert PidFile(path).read() == server.pid


def test_the_file_of_a_killed_server_is_an_orphan(path, server):
    server.kill()
    server.wait()
    assert path.exists()
    pid_file = PidFile(path)
    assert pid_file.read() is None
    assert pid_file.claim() is True
    pid_file.release()


def test_a_pid_that_a_stranger_has_now_is_an_orphan(path):
    path.write_text(str(os.getppid()))
    assert PidFile(path).read() is None


def test_torchserves_own_server_is_found_and_keeps_others_out(path):
    command = [sys.executable, "-c", "input()", "org.pytorch.serve.ModelServer", "--python"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, text=True) as java:
        path.write_text(str(java.pid))
        assert PidFile(path).read() is None
        assert PidFile(path).read_java() == java.pid
        with pytest.raises(PidFileError, match=f"Stop it first: kill {java.pid}\n"):
            PidFile(path).claim()
        assert path.read_text() == str(java.pid)
        java.communicate("\n")
    assert PidFile(path).read_java() is None
    pid_file = PidFile(path)
    assert pid_file.claim() is True
    pid_file.release()


def test_a_claim_passes_to_the_child_without_a_gap(path):
    starter = PidFile(path)
    starter.claim()
    with start_server(path, starter.fileno()) as child:
        starter.hand_over(child.pid)
        assert PidFile(path).read() == child.pid
        starter.release()  # it holds nothing any more
        assert PidFile(path).read() == child.pid
        child.communicate("")
    assert not path.exists()


def test_an_adopted_descriptor_is_not_inherited_further(path):
    starter, server = PidFile(path), PidFile(path)
    starter.claim()
    descriptor = os.dup(starter.fileno())
    os.set_inheritable(descriptor, True)
    server.adopt(descriptor)
    assert not os.get_inheritable(descriptor)
    starter.hand_over(os.getpid())
    server.release()


def test_a_descriptor_of_another_file_is_not_adopted(path):
    path.touch()
    with Path(os.devnull).open() as other, pytest.raises(PidFileError, match="not the pid file"):
        PidFile(path).adopt(other.fileno())


def test_release_leaves_the_file_of_a_successor_alone(path):
    first, second = PidFile(path), PidFile(path)
    first.claim()
    path.unlink()
    second.claim()
    first.release()
    assert path.exists()
    second.release()


def test_a_link_in_the_shared_directory_is_not_followed(path, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    path.symlink_to(victim)
    with pytest.raises(PidFileError, match="Set TMPDIR"):
        PidFile(path).claim()
    assert victim.read_text() == "precious"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_not_believed(path):
    path.write_text("1")
    os.chown(path, 65534, 65534)
    with path.open() as theirs:
        fcntl.flock(theirs, fcntl.LOCK_EX)
        with pytest.raises(PidFileError, match="belongs to another user"):
            PidFile(path).read()


def test_a_path_that_is_not_a_regular_file_is_refused(path):
    os.mkfifo(path)  # open() waits for the other end
    for use in (PidFile(path).read, PidFile(path).claim):
        with pytest.raises(PidFileError, match="not a regular file"):
            use()
    path.unlink()
    path.mkdir()
    with pytest.raises(PidFileError, match="not a regular file"):
        PidFile(path).read()


def test_a_locked_file_without_a_number_has_no_pid(path):
    with path.open("w") as starting:
        fcntl.flock(starting, fcntl.LOCK_EX)
        assert PidFile(path).read() is None


def test_a_server_whose_file_was_removed_is_found(path, server):
    path.unlink()
    assert PidFile(path).read() == server.pid
    with pytest.raises(PidFileError, match=f"already running(.|\n)*pid {server.pid}"):
        PidFile(path).claim()
    assert not path.exists()
    server.kill()
    server.wait()
    assert PidFile(path).read() is None


def test_a_file_that_was_removed_is_made_again(path):
    pid_file = PidFile(path)
    pid_file.claim()
    path.unlink()
    pid_file.keep()
    assert PidFile(path).read() == os.getpid()
    os.utime(path, (0, 0))
    pid_file.keep()
    assert path.stat().st_mtime > 0
    pid_file.release()
    pid_file.keep()
    assert not path.exists()
