"""No space left where logs, snapshots and unpacked models lie: two disks of the server's own."""

import subprocess
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(
        subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode != 0,
        reason="nobody may mount anything here",
    ),
]

ECHO = "def handle(d, c):\n    return d and ['in'] * len(d)\n"
# The mounts are seen by the server alone, and end with it.
MOUNTED = """#!/bin/sh
exec unshare -rm sh -c '
    for place in logs t; do mount -t tmpfs -o size=2m tmpfs $place || exit; done
    exec {} "$@"' server "$@"
"""


@pytest.fixture
def own(prepare_server, tmp_path):
    """A server with little room; it writes snapshots."""
    with prepare_server() as server:
        (server.directory / "logs").mkdir()
        program = tmp_path / "program"
        program.write_text(MOUNTED.format(server.program))
        program.chmod(0o755)
        server.program, server.habits = program, []
        server.start()
        yield server
        server.stop()


def fill(server, place):
    """Take all room of one of its disks; the file that takes it."""
    seen = Path(f"/proc/{server.process.pid}/root/{server.directory}/{place}/filler")
    with seen.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            pass
    return seen


def test_a_full_disk_stops_registrations_and_nothing_else(own, make_archive):
    make_archive(own.store, ECHO, "echo")
    assert own.register("echo.mar", initial_workers=1).ok
    fillers = [fill(own, "logs"), fill(own, "t")]
    assert [own.predict("echo", data=b"x").text for _ in range(3)] == ["in"] * 3
    assert own.management("PUT", "/models/echo?min_worker=2&synchronous=true").ok
    refused = own.register("echo.mar", model_name="other")
    assert refused.status_code == 400
    assert "bytes it may unpack to" in refused.json()["message"]
    for _ in range(60):  # more lines than fit the page that the log has begun
        own.management("DELETE", "/models/nobody")
    own.wait_printed("ts_log.log cannot be written: [Errno 28]")
    console = own.console_text()
    assert console.count("Snapshots cannot be written; the server continues:") == 1
    assert console.count("ts_log.log cannot be written: [Errno 28]") == 1
    for filler in fillers:
        filler.unlink()
    assert own.register("echo.mar", model_name="other", initial_workers=1).ok
    assert own.predict("other", data=b"x").text == "in"
    snapshots = Path(f"/proc/{own.process.pid}/root/{own.directory}/logs/config")
    newest = max(snapshots.iterdir())
    assert '"other"' in newest.read_text().replace("\\", "")
