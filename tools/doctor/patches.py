"""``--write``: the fixes of findings as a diff, and into the files, each with a backup."""

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
# Not splitlines(), which also splits at characters that are ordinary ones in these files.
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")


@dataclass(frozen=True)
class Patch:
    """A file, what stands in it, and what shall."""

    path: Path
    before: bytes
    after: bytes


def patches(findings: Iterable[Finding]) -> list[Patch]:
    """What the fixes make of their files, of a file with two names once.

    Of two fixes of one line the first counts; a line that has changed meanwhile is left alone.

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
        # A name that this encoding lacks makes the file one in UTF-8.
        after = _encoded(_patched(text, fixes), encoding)
        if after != before:
            made.append(Patch(path, before, after))
    return made


def diff(changes: Iterable[Patch], root: Path) -> str:
    """All changes as a unified diff, by paths below ``root``."""
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
    """Write the files; returns the backups of what was there.

    In place, so that owner, mode and links stay, and what is read-only is not written.

    Raises:
        DoctorError: One cannot be written, or is another than in the diff; those before it are.
    """
    backups = []
    for each in changes:
        if _read(each.path) != each.before:
            raise DoctorError(f"{each.path} has changed meanwhile; it was not written.")
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
    raise DoctorError(f"{path} has a thousand backups; remove some.")


def _read(path: Path) -> bytes:
    try:
        return read_file(path)
    except OSError as error:
        raise DoctorError(f"{path} cannot be read: {error.strerror}.") from error
