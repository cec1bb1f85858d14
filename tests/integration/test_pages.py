"""The commands of README.md and of pages in docs do what they say.

Every shell block is run in order, in one shell; a block of text below it is what it prints. Left
out are the blocks that install, and the ports are others than the pages'. A block of code that
bears the name of a file is that file. Blocks of a console are a session at a terminal.
"""

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from servers import PATIENCE, free_ports, is_open, wait_for
from terminal import Terminal

pytestmark = [pytest.mark.integration, pytest.mark.environments]

ROOT = Path(__file__).parents[2]
LISTENERS = {8080: "inference", 8081: "management", 8082: "metrics"}
GRPC_LISTENERS = {7070: "inference", 7071: "management"}
BLOCK = re.compile(
    r"^```(?:bash|(?:python|yaml|properties) (\S+))\n(.*?)^```\n(?:\s*^```text\n(.*?)^```\n)?",
    re.MULTILINE | re.DOTALL,
)
CONSOLE = re.compile(r"^```console\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
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
        Step(writing(file, text) if file else text, tuple(printed.splitlines()))
        for file, text, printed in found
        if not any(install in text for install in INSTALLS)
    ]


def writing(file: str, text: str) -> str:
    """The commands that make a file."""
    return f"mkdir -p $(dirname {file})\ncat > {file} <<'END_OF_FILE'\n{text}END_OF_FILE\n"


class Shell:
    """Runs all the steps of a page in one directory, beside servers of other tests."""

    def __init__(self, directory: Path, **properties: str) -> None:
        self.directory = directory
        listeners = (*LISTENERS, *GRPC_LISTENERS)
        self.ports = dict(zip(listeners, free_ports(len(listeners)), strict=True))
        temp, home = directory / "t", directory / "home"
        temp.mkdir()
        home.mkdir()
        # curl tells of its progress where its output is no terminal.
        (home / ".curlrc").write_text("silent\nshow-error\n")
        settings = directory / "config.properties"
        properties |= {f"{LISTENERS[port]}_address": self.here(port) for port in LISTENERS}
        for port, name in GRPC_LISTENERS.items():
            properties[f"grpc_{name}_port"] = str(self.ports[port])
        settings.write_text("".join(f"{key}={value}\n" for key, value in properties.items()))
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
            timeout=300,
        )

    def begin(self, command: str) -> "subprocess.Popen[str]":
        """Start a command and do not wait."""
        return subprocess.Popen(
            ["bash", "-c", self.adapt(command)],
            cwd=self.directory,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def adapt(self, text: str) -> str:
        """The same with the ports of this test."""
        text = re.sub(r"http://[\w.]+:(\d+)", lambda url: self.here(int(url[1])), text)
        listener = rf"localhost:({'|'.join(map(str, self.ports))})"
        return re.sub(listener, lambda at: f"localhost:{self.ports[int(at[1])]}", text)


def assert_printed(output: str, lines: tuple[str, ...]) -> None:
    """The lines come in this order. Fractions are not compared, and the log may come between."""
    position = 0
    for line in lines:
        pieces = [
            re.sub(r"\d+\\\.\d+", r"[\\d.]+", re.escape(part)) for part in line.split(LEFT_OUT)
        ]
        found = re.compile(".*".join(pieces)).search(output, position)
        assert found, f"{line!r} is not in the rest of:\n{output}"
        position = found.end()


def test_the_page_for_newcomers(tmp_path):
    page = (ROOT / "docs" / "getting-started.md").read_text(encoding="utf-8")
    shell, steps = Shell(tmp_path), steps_of(page)
    assert len(steps) > 5
    for step, output in zip(steps, shell.run(steps), strict=True):
        assert_printed(output, tuple(map(shell.adapt, step.printed)))


def test_the_readme(tmp_path):
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    (_, targets, _), (_, commands, printed) = BLOCK.findall(page)
    _, *targets = targets.splitlines()  # the first line clones
    for target in targets:
        words = shlex.split(target, comments=True)
        done = subprocess.run([*words, "--dry-run"], cwd=ROOT, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr
    lines = commands.splitlines()
    assert len(lines) == 6
    served = Step("\n".join(lines[3:]), tuple(printed.splitlines()))  # before: what installs
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    output, _ = Shell(tmp_path).run([served, Step("torchserve --stop", ())])
    assert_printed(output, served.printed)


@pytest.mark.parametrize("name", ["sequences", "workflows", "grpc", "clients"])
def test_the_page_about(name, tmp_path):
    follow(name, tmp_path)


def test_the_page_about_a_second_server(tmp_path):
    page = (ROOT / "docs" / "second-server.md").read_text(encoding="utf-8")
    shell = Shell(tmp_path, preload_modules="")
    del shell.environment["TS_CONFIG_FILE"]  # each server reads the file of its directory
    *http, inference, management = free_ports(5)
    shell.ports |= dict(zip((9080, 9081, 9082), http, strict=True))
    page = page.replace("=9070", f"={inference}").replace("=9071", f"={management}")
    (tmp_path / "model_store").mkdir()
    first = Step("torchserve --start --model-store model_store", ("The server listens",))
    still = Step("curl http://localhost:8080/ping", ("Healthy",))
    stop = Step(f"TMPDIR={tmp_path}/t torchserve --stop", ("TorchServe has stopped.",))
    steps = [first, *steps_of(page), still, stop]
    try:
        for step, output in zip(steps, shell.run(steps), strict=True):
            assert_printed(output, tuple(map(shell.adapt, step.printed)))
    finally:
        shell.bash("TMPDIR=$PWD/second/tmp torchserve --stop")


def test_the_page_about_the_catalog(tmp_path):
    follow("catalog", tmp_path, model_catalog="catalog/catalog.json", model_catalog_interval="0.3")


def test_the_page_about_the_doctor(tmp_path):
    page = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")
    examples = page.partition("\n## An example\n")[2]  # before it are files that anybody has
    shell = Shell(tmp_path)
    # Under another name, for the shell has a configuration file of its own. No server is asked.
    steps = steps_of(examples.replace("config.properties", "ours.properties"))
    for step, output in zip(steps, shell.run(steps), strict=True):
        assert_printed(output, tuple(map(shell.adapt, step.printed)))


def test_the_page_about_open_inference(tmp_path, client_python):
    (tmp_path / "clients").symlink_to(client_python.parents[1])
    follow("open-inference", tmp_path)


def test_the_page_about_performance_options(tmp_path):
    pytest.importorskip("torch")
    (tmp_path / "model_store").mkdir()
    follow("performance-options", tmp_path)


def test_batches_by_length_on_the_page_about_batching(tmp_path):
    page = (ROOT / "docs" / "batching.md").read_text(encoding="utf-8")
    start = page.partition("\nThe examples use")[2].partition("\n## ")[0]
    section = page.partition("\n## Batches by length\n")[2].partition("\n## ")[0]
    shell, steps = Shell(tmp_path, preload_modules=""), steps_of(start + section)
    *_, output, _ = shell.run([*steps, Step("torchserve --stop", ())])
    document, _ = json.JSONDecoder().raw_decode(output, output.rindex('{\n  "modelName"'))
    by_length = [batch["longest"] for batch in document["batches"]]
    assert min(batch["paddingShare"] for batch in document["batches"]) < 0.5
    assert {longest > 1000 for longest in by_length} == {False, True}


def test_embeddings_on_the_page_about_language_models(tmp_path):
    page = (ROOT / "docs" / "llm.md").read_text(encoding="utf-8")
    section = page.partition("\n## Embeddings and reranking by any handler\n")[2]
    shell = Shell(tmp_path, preload_modules="")
    steps = [*steps_of(section), Step("torchserve --stop", ())]
    for step, output in zip(steps, shell.run(steps), strict=True):
        assert_printed(output, tuple(map(shell.adapt, step.printed)))


def test_the_page_for_authors_of_handlers(tmp_path):
    shell, page = follow("writing-handlers", tmp_path)
    with contextlib.closing(Terminal()) as terminal:
        try:
            play(shell, terminal, CONSOLE.findall(page))
        finally:
            shell.bash("torchserve --stop")


def follow(name: str, tmp_path: Path, **properties: str) -> tuple[Shell, str]:
    """Run all steps of a page, whose models do without torch; its shell, and its text."""
    page = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    shell, steps = Shell(tmp_path, preload_modules="", **properties), steps_of(page)
    for step, output in zip(steps, shell.run(steps), strict=True):
        assert_printed(output, tuple(map(shell.adapt, step.printed)))
    return shell, page


def play(shell: Shell, terminal: Terminal, blocks: list[str]) -> None:
    """A session at two terminals: one has the server and the debugger, the other asks."""
    asked: list[tuple[subprocess.Popen[str], list[str]]] = []
    for block in blocks:
        for line in block.splitlines():
            kind, _, typed = line.partition(" ")
            if kind == "$" and typed.startswith("torchserve"):
                terminal.start(shlex.split(typed), shell.environment, shell.directory)
                wait_for(lambda: is_open(shell.ports[8080]), what=lambda: terminal.text)
            elif kind == "$":
                answered(asked)
                asked.append((shell.begin(typed), []))
            elif kind == "(Pdb)":
                terminal.wait("(Pdb) ")
                terminal.type(f"{typed}\n")
            elif asked and "(Pdb)" not in block:
                asked[-1][1].append(line)
            else:
                for piece in filter(None, line.split(LEFT_OUT)):
                    terminal.wait(piece)
    answered(asked)


def answered(asked: list[tuple["subprocess.Popen[str]", list[str]]]) -> None:
    """What was asked is answered as it should be."""
    for asking, lines in asked:
        output, _ = asking.communicate(timeout=PATIENCE)
        assert_printed(output, tuple(lines))
    asked.clear()
