"""Ask TorchServe and marserve the same, and print every difference.

    python tests/compat/compare.py --torchserve /path/to/venv/bin/torchserve

Both are started on free ports of this machine with the same config.properties and the same
archives, packed by the `torch-model-archiver` beside the given `torchserve`. What is asked stands
in `questions.py`, what may differ from run to run in `masks.py`, and what is meant to differ, with
its reason, in `differences.py`. The exit status is 1 when there is a difference without a reason.

Answers can be kept: with `--answers FOLDER` they are written there, and those of a server whose
command line is not given are read from there. So, after one whole run,

    python tests/compat/compare.py --answers FOLDER --marserve .venv/bin/torchserve

asks only ours again, and without `--marserve` nobody is asked and the table is printed again.
"""

import argparse
import difflib
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from archives import pack_all
from differences import EXPECTED, index_of
from masks import aspects
from peers import Contestant, NotStarted, file_server
from questions import SETTINGS
from servers import TORCHSERVE as MARSERVE
from steps import Setting

Answers = dict[str, dict[str, str]]  # request -> aspect -> what was answered
_WIDTH = 200
_LINES = 12


@dataclass(frozen=True)
class Difference:
    """One aspect of one answer.

    Attributes:
        setting: Under which it was asked.
        request: What was asked.
        aspect: status, reason, header NAME, body, chunks, interim or cut.
        theirs: What TorchServe answered; None for nothing of the kind.
        ours: What marserve answered.
        line: Of the table of expected differences; None when it is not expected.
    """

    setting: str
    request: str
    aspect: str
    theirs: str | None
    ours: str | None
    line: int | None


def main() -> int:
    """Run the comparison."""
    options = _options()
    settings = [setting for setting in SETTINGS if options.only in setting.name]
    answers = Answers(options.answers)
    programs = {"torchserve": options.torchserve, "marserve": options.marserve}
    asked = {name: program for name, program in programs.items() if program is not None}
    if asked:
        _ask_everything(asked, settings, answers)
    found = [
        difference
        for setting in settings
        for difference in differences(
            setting.name, *(answers.of(name, setting.name) for name in programs)
        )
    ]
    _print(found, show_expected=options.expected)
    if settings == list(SETTINGS):
        _print_unused(found)
    return any(item.line is None for item in found)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--torchserve", type=_program, help="command line of the real one")
    parser.add_argument("--marserve", type=_program, help="command line of ours")
    parser.add_argument("--answers", type=Path, help="folder where answers are kept")
    parser.add_argument("--only", default="", help="settings whose name contains this")
    parser.add_argument("--expected", action="store_true", help="print expected differences too")
    options = parser.parse_args()
    if options.marserve is None and options.torchserve is not None:
        options.marserve = MARSERVE
    if options.torchserve is None and options.answers is None:
        parser.error("give --torchserve, --answers, or both")
    return options


def _program(text: str) -> Path:
    """A command line; absolute, because servers start in directories of their own."""
    return Path(text).absolute()


class Answers:
    """What the servers said, by server and setting; kept in a folder if there is one."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._answers: dict[str, dict[str, Answers]] = {}

    def of(self, server: str, setting: str) -> Answers:
        """The answers of a server under a setting."""
        return self._of(server).get(setting, {})

    def put(self, server: str, setting: str, answers: Answers) -> None:
        """Keep them."""
        self._of(server)[setting] = answers
        if self._folder is not None:
            self._folder.mkdir(exist_ok=True)
            self._file(server).write_text(json.dumps(self._answers[server], indent=1))

    def _of(self, server: str) -> dict[str, Answers]:
        if server not in self._answers:
            kept = self._folder is not None and self._file(server).exists()
            self._answers[server] = json.loads(self._file(server).read_text()) if kept else {}
        return self._answers[server]

    def _file(self, server: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{server}.json"


def _ask_everything(
    programs: Mapping[str, Path], settings: Sequence[Setting], answers: Answers
) -> None:
    """Ask each server under each setting; the servers at the same time."""
    archiver = next(iter(programs.values())).with_name("torch-model-archiver")
    with (
        tempfile.TemporaryDirectory(prefix="cmp") as folder,
        ThreadPoolExecutor(len(programs)) as threads,
    ):
        archives = Path(folder) / "archives"
        pack_all(archiver, archives)
        with file_server(archives) as files:
            for setting in settings:
                futures = {
                    name: threads.submit(interview, program, archives, setting, files)
                    for name, program in programs.items()
                }
                for name, future in futures.items():
                    answers.put(name, setting.name, future.result())
                print(f"{setting.name}: asked", flush=True)


def interview(program: Path, archives: Path, setting: Setting, files: str) -> Answers:
    """Start a server, ask it everything of a setting, end it."""
    peer = Contestant(program, archives, setting, files)
    answers: Answers = {}
    try:
        peer.start()
        for step in setting.steps:
            for name, answer in step.run(peer):
                answers[_unused(name, answers)] = aspects(peer, answer)
    except NotStarted as error:
        print(f"{program} does not start under {setting.name!r}: {error}", flush=True)
    finally:
        peer.close()
    return answers


def _unused(name: str, answers: Answers) -> str:
    """The name, numbered when the same was asked before."""
    number = sum(other.partition(" #")[0] == name for other in answers)
    return f"{name} #{number + 1}" if number else name


def differences(setting: str, theirs: Answers, ours: Answers) -> Iterator[Difference]:
    """Everything in which the answers to the questions of a setting differ."""
    for request, their_answer in theirs.items():
        our_answer = ours.get(request)
        if our_answer is None:
            yield Difference(setting, request, "status", their_answer["status"], None, None)
            continue
        for aspect in dict.fromkeys([*their_answer, *our_answer]):
            pair = their_answer.get(aspect), our_answer.get(aspect)
            # Phrase and headers follow from the status; where it differs they tell nothing more.
            if their_answer["status"] != our_answer["status"] and aspect not in ("status", "body"):
                continue
            if pair[0] != pair[1]:
                line = index_of(setting, request, aspect)
                yield Difference(setting, request, aspect, *pair, line)


def _print(found: Sequence[Difference], *, show_expected: bool) -> None:
    heading = None
    for item in found:
        if item.line is not None and not show_expected:
            continue
        if heading != (heading := (item.setting, item.request)):
            print("\n{} | {}".format(*heading))
        print(f"    {item.aspect}: {'NO REASON' if item.line is None else EXPECTED[item.line][3]}")
        for line in _lines_of(item):
            print(f"        {line}")
    unexpected = sum(value.line is None for value in found)
    print(f"\n{len(found)} differences, {unexpected} of them without a reason")


def _lines_of(difference: Difference) -> Iterator[str]:
    """Short values whole, of long ones the lines that differ: - TorchServe's, + ours."""
    theirs, ours = ((value or "").splitlines() for value in (difference.theirs, difference.ours))
    if max(len(theirs), len(ours)) <= 1:
        for server, value in ("TorchServe", difference.theirs), ("marserve", difference.ours):
            yield f"{server:<11} {'(absent)' if value is None else repr(value)[:_WIDTH]}"
        return
    changes = [
        line[:_WIDTH]
        for line in list(difflib.unified_diff(theirs, ours, n=0))[2:]
        if not line.startswith("@@")
    ]
    yield from changes[:_LINES]
    if len(changes) > _LINES:
        yield f"… {len(changes) - _LINES} more lines"


def _print_unused(found: Sequence[Difference]) -> None:
    """Say which lines of the table speak of nothing any more."""
    used = {item.line for item in found}
    for number, line in enumerate(EXPECTED):
        if number not in used:
            print(f"expected, but does not differ: {line[:3]}")


if __name__ == "__main__":
    sys.exit(main())
