"""The commands of README.md and of docs/getting-started.md do what the pages say.

Every shell block is run in order, in one shell; a block of text below it is what it prints. Left
out are the blocks that install, and the ports are others than the pages'.
"""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from servers import free_ports

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
LISTENERS = {8080: "inference", 8081: "management", 8082: "metrics"}
BLOCK = re.compile(r"^```bash\n(.*?)^```\n(?:\s*^```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)
INSTALLS = ("git clone", "pip install")
LEFT_OUT = "…"


@dataclass(frozen=True)
class Step:
    """A block of commands, and the lines that it prints, with gaps."""

    commands: str
    printed: tuple[str, ...]


def steps_of(page: str) -> list[Step]:
    """The blocks of a page that a reader runs once everything is installed."""
    found = BLOCK.findall(page)
    return [
        Step(commands, tuple(printed.splitlines()))
        for commands, printed in found
        if not any(one in commands for one in INSTALLS)
    ]


class Shell:
    """Runs all the steps of a page in one directory, beside servers of other tests."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.ports = dict(zip(LISTENERS, free_ports(len(LISTENERS)), strict=True))
        temp, home = directory / "t", directory / "home"
        temp.mkdir()
        home.mkdir()
        # curl tells of its progress where its output is no terminal.
        (home / ".curlrc").write_text("silent\nshow-error\n")
        settings = directory / "test.properties"
        lines = [f"{LISTENERS[port]}_address={self.here(port)}\n" for port in LISTENERS]
        settings.write_text("".join(lines))
        self.environment = {
            **os.environ,
            "CURL_HOME": str(home),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "TMPDIR": str(temp),
            "TS_CONFIG_FILE": str(settings),
        }

    def here(self, port: int) -> str:
        return f"http://127.0.0.1:{self.ports[port]}"

    def run(self, steps: list[Step]) -> list[str]:
        """What each of the steps prints."""
        script = "".join(f"echo '@@'\n{self.adapt(step.commands)}\n" for step in steps)
        try:
            done = self.bash(script)
        finally:
            self.bash("torchserve --stop")
        assert done.returncode == 0, done.stdout
        return done.stdout.split("@@\n")[1:]

    def bash(self, script: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            ["bash", "-eu", "-o", "pipefail", "-c", script],
            cwd=self.directory,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
        )

    def adapt(self, text: str) -> str:
        """The same with the ports of this test."""
        return re.sub(r"http://[\w.]+:(\d+)", lambda url: self.here(int(url[1])), text)


def assert_printed(output: str, lines: tuple[str, ...]) -> None:
    """The lines come in this order. Fractions are not compared, and the log may come between."""
    position = 0
    for line in lines:
        pieces = [re.sub(r"\d+\\\.\d+", r"[\\d.]+", re.escape(one)) for one in line.split(LEFT_OUT)]
        found = re.compile(".*".join(pieces)).search(output, position)
        assert found, f"{line!r} is not in the rest of:\n{output}"
        position = found.end()


def test_the_page_for_newcomers(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "getting-started.md").read_text(encoding="utf-8")
    shell, steps = Shell(tmp_path), steps_of(page)
    assert len(steps) > 5
    for step, output in zip(steps, shell.run(steps), strict=True):
        assert_printed(output, tuple(map(shell.adapt, step.printed)))


def test_the_readme(tmp_path: Path) -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    usage = page.partition("\n## Use it\n")[2].partition("\n### ")[0]
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    (tmp_path / "model_store").mkdir()
    steps = steps_of(usage)
    (output,) = Shell(tmp_path).run(steps)
    assert_printed(output, ('"digit":', '"modelName": "digits"', "# HELP", "has stopped."))
