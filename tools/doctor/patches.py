"""``--write``: show the fixes of findings as a diff and apply them, with backups."""

import difflib
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from marserve.tools.doctor.errors import DoctorError
from marserve.tools.doctor.findings import Finding, Fix
from marserve.tools.doctor.sources import decode
from marserve.tools.files import read_file

_BACKUP = ".orig"
# Not splitlines(), which also splits at characters that do not end lines in these files.
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")


@dataclass(frozen=True)
class Patch:
    """A file with its content before and after the fixes."""

    path: Path
    before: bytes
    after: bytes


def patches(findings: Iterable[Finding]) -> list[Patch]:
    """Apply the fixes in memory, once for a file with several names.

    The first of several fixes of a line is applied. A line that has changed since is not fixed.

    Raises:
        DoctorError: A file cannot be read.
    """
    by_file: dict[Path, dict[int, Fix]] = {}
    for found in findings:
        for fix in found.fixes:
            by_file.setdefault(fix.path.resolve(), {}).setdefault(fix.line, fix)
    made = []
    for path, fixes in by_file.items():
        before = _read(path)
        text, encoding = decode(before)
        # A character outside of the encoding converts the file to UTF-8.
        after = _encoded(_patched(text, fixes), encoding)
        if after != before:
            made.append(Patch(path, before, after))
    return made


def diff(changes: Iterable[Patch], root: Path) -> str:
    """Return all changes as a unified diff, with paths relative to ``root``."""
    parts: list[str] = []
    root = root.resolve()
    for each in changes:
        path = each.path
        name = path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path)
        before, after = (
            decode(of)[0].splitlines(keepends=True) for of in (each.before, each.after)
        )
        parts += difflib.unified_diff(before, after, f"a/{name}", f"b/{name}")
    return "".join(part if part.endswith("\n") else f"{part}\n" for part in parts)


def write(changes: Sequence[Patch]) -> list[Path]:
    """Write the files and return the paths of their backups.

    Files are written in place, which keeps owner, mode and links and respects read-only files.

    Raises:
        DoctorError: A file cannot be written or differs from the diff. Earlier files are written.
    """
    backups = []
    for each in changes:
        if _read(each.path) != each.before:
            raise DoctorError(f"{each.path} has changed since the diff; it was not written.")
        try:
            with each.path.open("r+b") as file:
                backup = _free_name(each.path)
                shutil.copy2(each.path, backup)
                backups.append(backup)
                file.write(each.after)
                file.truncate()
        except OSError as error:
            raise DoctorError(f"{each.path} cannot be written: {error.strerror}.") from error
    return backups


def _encoded(text: str, encoding: str) -> bytes:
    try:
        return text.encode(encoding)
    except UnicodeEncodeError:
        return text.encode("utf-8")


def _patched(text: str, fixes: Mapping[int, Fix]) -> str:
    lines = _LINE.findall(text)
    for number, fix in fixes.items():
        line = lines[number - 1] if number <= len(lines) else ""
        content = line.rstrip("\r\n")
        if line and content == fix.before:
            ending = line[len(content) :]
            after = "" if fix.after is None else fix.after.replace("\n", ending or "\n") + ending
            lines[number - 1] = after
    return "".join(lines)


def _free_name(path: Path) -> Path:
    for number in range(1000):
        name = f"{path.name}{_BACKUP}{f'.{number}' if number else ''}"
        if not (backup := path.with_name(name)).exists():
            return backup
    raise DoctorError(f"{path} has 1000 backups; remove some.")


def _read(path: Path) -> bytes:
    try:
        return read_file(path)
    except OSError as error:
        raise DoctorError(f"{path} cannot be read: {error.strerror}.") from error
