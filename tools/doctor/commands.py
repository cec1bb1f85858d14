"""Command lines of a server in images, manifests and scripts."""

import contextlib
import io
import json
import re
import shlex
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import PurePath

from marserve.frontend.cli import build_parser
from marserve.tools.doctor.findings import Finding, Place
from marserve.tools.doctor.rules import finding

_SERVERS = ("torchserve", "marserve")
_ENDS = ("&&", "||", ";", "|", "&", ">", ">>", "2>", "2>&1", "&>", "<", "then", "fi", "do", "done")


@dataclass(frozen=True)
class Command:
    """The arguments of a ``torchserve`` command, and the place of the command."""

    place: Place
    arguments: Sequence[str]
    in_container: bool = False  # whether a container runs it


def parse(arguments: Sequence[str]) -> tuple[Namespace | None, str]:
    """Parse arguments as the server does; return the options, or None and the error."""
    message = io.StringIO()
    with contextlib.redirect_stderr(message), contextlib.redirect_stdout(io.StringIO()):
        try:
            return build_parser(_SERVERS[0]).parse_args(list(arguments)), ""
        except SystemExit:
            return None, message.getvalue().strip().rpartition("error: ")[2]


def commands_in(text: str, place: Place, *, in_container: bool = False) -> Iterator[Command]:
    """Return the server commands in a shell line."""
    try:
        lexer = shlex.shlex(text, posix=True, punctuation_chars="();|&")
        lexer.whitespace_split = True
        words = [*lexer]
    except ValueError:  # an open quotation: continued on another line, or not shell code
        return
    at = 0
    while at < len(words):
        is_command = at == 0 or words[at - 1] in (*_ENDS, "exec", "nohup", "sudo", "(", "$(")
        # An assignment NAME=value may precede the command.
        is_command = is_command or re.fullmatch(r"\w+=.*", words[at - 1]) is not None
        if is_command and PurePath(words[at]).name in _SERVERS:
            end = at + 1
            while end < len(words) and not _is_end(words[end]):
                end += 1
            yield Command(place, words[at + 1 : end], in_container)
            at = end
        at += 1


def commands_of_words(words: Sequence[object], place: Place) -> Iterator[Command]:
    """Return the server commands in the arguments of a container, including ``sh -c`` scripts."""
    text = " ".join(str(word) for word in words)
    parts = [str(word) for word in words]
    if len(parts) > 1 and parts[-2] in ("-c", "-lc", "-ec"):
        text = parts[-1]
    for line in text.splitlines() or [text]:
        yield from commands_in(line, place, in_container=True)


def foreign_settings_of(text: str) -> list[str]:
    """Split CMD or ENTRYPOINT: a JSON list, or one shell line."""
    with contextlib.suppress(ValueError):
        words = json.loads(text)
        if isinstance(words, list):
            return [str(word) for word in words]
    return [text]


def check_command(command: Command) -> Iterator[Finding]:
    """Report flags that are refused or have no effect."""
    options, why = parse(command.arguments)
    if unknown := [word for word in command.arguments if _is_unknown_flag(word)]:
        why = f"unrecognized arguments: {' '.join(unknown)}"
    elif options is None and any(map(_is_filled_in, command.arguments)):
        return  # the value is a variable
    if options is None:
        yield finding(
            "command-flag",
            command.place,
            f"torchserve does not start with {shlex.join(command.arguments)}: {why}",
            "Correct the command; `torchserve --help` lists the flags.",
        )
        return
    if options.cpp_log_config:
        what = "--cpp-log-config has no effect, because marserve has no C++ backend."
        yield finding("no-effect-flag", command.place, what, "Remove it.")
    if options.plugins_path:
        what = f"--plugins-path {options.plugins_path} has no effect: there is no Java."
        do = "Remove it and the calls of the plugins' endpoints."
        yield finding("no-effect-flag", command.place, what, do)


def _is_filled_in(word: str) -> bool:
    """Whether a shell or a chart puts something else in its place."""
    return "$" in word or "`" in word or "templated" in word


def _is_unknown_flag(word: str) -> bool:
    flag = word.partition("=")[0]
    is_flag = flag.startswith("-") and not _is_filled_in(flag)
    return is_flag and not any(known.startswith(flag) for known in _known_flags())


@lru_cache(maxsize=1)
def _known_flags() -> frozenset[str]:
    return frozenset(re.findall(r"(?<!\w)--?[a-z][a-z-]*", build_parser(_SERVERS[0]).format_help()))


def _is_end(word: str) -> bool:
    return word in _ENDS or word[0] in ">#" or set(word) <= set("();|&")
