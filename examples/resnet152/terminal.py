"""Prints commands as a user would type them, and runs them."""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

_WIDTH = 96


class DemoFailed(Exception):
    """The demo cannot continue, or something that it printed is wrong."""


def say(sentence: str) -> None:
    """Print a sentence between the commands, without buffering."""
    print(sentence, flush=True)


def show(command: Sequence[str], *, then: str = "") -> None:
    """Print a command, wrapped if long; ``then`` is shell syntax such as ``> FILE &``."""
    lines = ["$"]
    for piece in [*_pieces(command), *([then] if then else [])]:
        if len(lines[-1]) + 1 + len(piece) > _WIDTH:
            lines[-1] += " \\"
            lines.append("   ")
        lines[-1] += f" {piece}"
    say("\n" + "\n".join(lines))


def run(command: Sequence[str], *, timeout: float = 300.0) -> str:
    """Print one of the project's commands, run it and return its output, stripped.

    Raises:
        DemoFailed: The command failed or took longer than ``timeout`` seconds.
    """
    show(command)
    try:
        done = subprocess.run(
            located(command), capture_output=True, text=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        raise DemoFailed(f"{command[0]} did not end within {timeout:g} s.") from None
    if done.returncode:
        raise DemoFailed(f"{command[0]} failed: {(done.stderr or done.stdout).strip()}")
    return done.stdout.strip()


def start(command: Sequence[str], log: Path) -> "subprocess.Popen[bytes]":
    """Print a command and start it in the background, with its output in a file.

    It is in another session, so that Ctrl-C signals only the demo.
    """
    show(command, then=f"> {shlex.quote(readable(log))} 2>&1 &")
    output: IO[bytes]
    with log.open("wb") as output:
        return subprocess.Popen(
            located(command), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )


def located(command: Sequence[str]) -> list[str]:
    """Return a command with its full path, since the environment may not be activated."""
    beside = Path(sys.executable).parent / command[0]
    path = str(beside) if beside.is_file() else shutil.which(command[0])
    if path is None:
        raise DemoFailed(f"The command {command[0]} is not installed: pip install -e '.[demo]'")
    return [path, *command[1:]]


def _pieces(command: Sequence[str]) -> list[str]:
    """Split a command into parts for one line each: a word, or an option with its value."""
    pieces: list[str] = []
    is_option = False
    for word in command:
        if is_option and not word.startswith("-"):
            pieces[-1] += f" {shlex.quote(word)}"
        else:
            pieces.append(shlex.quote(word))
        is_option = word.startswith("-") and not is_option
    return pieces


def readable(path: Path) -> str:
    """Return a path relative to the current directory, if it is below it."""
    return os.path.relpath(path) if path.absolute().is_relative_to(Path.cwd()) else str(path)
