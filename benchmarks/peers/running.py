"""Peers as child processes: started, asked for a right answer, frozen while others run, stopped."""

import contextlib
import http.client
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from contract import OWN_PYTHON, Service, Site
from wrk import Target

_WARDEN = Path(__file__).with_name("warden.py")
_GRACE_SECONDS = 8.0
_READY_SECONDS = 120.0
_TAIL_LINES = 12


class PeerFailed(Exception):
    """A peer did not start, or does not answer as it should; the text ends with its log's end."""


class RunningPeer:
    """A peer that has been started; see `start`.

    Attributes:
        target: Where and how it is asked.
    """

    def __init__(self, process: "subprocess.Popen[bytes]", target: Target, log: Path) -> None:
        self.target = target
        self._process = process
        self._log = log
        self._stopped: list[psutil.Process] = []

    def await_answer(self, service: Service, expected: bytes) -> None:
        """Ask until the answer is right.

        Raises:
            PeerFailed: It ended, gave no answer in time, or a wrong one.
        """
        deadline = time.monotonic() + _READY_SECONDS
        said = "nothing"
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise self.failure(f"ended with status {self._process.returncode}")
            with contextlib.suppress(OSError, http.client.HTTPException):
                status, answer = self._ask()
                if status == http.HTTPStatus.OK:
                    return self._compare(service, answer, expected)
                said = f"{status} {answer[:200]!r}"
            time.sleep(0.1)
        raise self.failure(f"not ready after {_READY_SECONDS:.0f} s; it last said {said}")

    def failure(self, why: str) -> PeerFailed:
        """An error that ends with the last lines of the peer's log."""
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        return PeerFailed("\n    ".join([why, *lines[-_TAIL_LINES:]]))

    def freeze(self) -> None:
        """Stop all its processes: what idles beside a measurement would take part in it."""
        self._stopped = self._family()
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let them go on."""
        self._signal(signal.SIGCONT)

    def dismiss(self) -> None:
        """Let it end, without waiting; the block that started it waits."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def cpu_seconds(self) -> float:
        """Processor time that its processes have used so far."""
        spent = 0.0
        for one in self._family():
            with contextlib.suppress(psutil.NoSuchProcess):
                times = one.cpu_times()
                spent += times.user + times.system
        return spent

    def _family(self) -> list[psutil.Process]:
        return psutil.Process(self._process.pid).children(recursive=True)

    def _signal(self, number: int) -> None:
        for one in self._stopped:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.send_signal(number)

    def _ask(self) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.target.port, timeout=30)
        with contextlib.closing(connection):
            connection.request(
                "POST",
                self.target.path,
                self.target.body_file.read_bytes(),
                {"Content-Type": self.target.content_type},
            )
            answer = connection.getresponse()
            return answer.status, answer.read()

    def _compare(self, service: Service, answer: bytes, expected: bytes) -> None:
        try:
            given = service.decode(answer)
        except (ValueError, LookupError, TypeError):
            given = answer
        if given != expected:
            raise self.failure(f"answers wrongly: {given[:200]!r} instead of {expected[:200]!r}")


@contextmanager
def start(service: Service, site: Site, body: bytes) -> Iterator[RunningPeer]:
    """Start a peer; it ends with the block, or with this process, however that ends.

    Args:
        service: How.
        site: Where.
        body: What clients want to send.
    """
    log, body_file = site.directory / "console.log", site.directory / "body"
    body_file.write_bytes(service.encode(body))
    command = [str(OWN_PYTHON), str(_WARDEN), str(_GRACE_SECONDS), *service.command]
    environment = {**os.environ, "TMPDIR": str(site.directory), **service.environment}
    with (
        log.open("wb") as console,
        subprocess.Popen(
            command,
            cwd=site.directory,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=console,
            stderr=console,
            start_new_session=True,  # a Ctrl-C is the benchmark's to hear
        ) as process,
    ):
        target = Target(site.ports[0], service.path, body_file, service.content_type)
        peer = RunningPeer(process, target, log)
        try:
            yield peer
        finally:
            peer.dismiss()
            process.wait(_GRACE_SECONDS + 30)
