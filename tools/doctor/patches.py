"""``--write``: the fixes of findings as a diff, and into the files, each with a backup."""

import difflib
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from marserve.tools.doctor.errors import DoctorError
from marserve.tools.doctor.findings import Finding, Fix

_BACKUP = ".orig"
# Not splitlines(), which also splits at characters that are ordinary ones in these files.
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")


def patched_files(findings: Iterable[Finding]) -> Mapping[Path, str]:
    """The new texts of the files that fixes change.

    Of two fixes of one line the first counts; a line that has changed meanwhile is left alone.

    Raises:
        DoctorError: A file cannot be read.
    """
    by_file: dict[Path, dict[int, Fix]] = {}
    for found in findings:
        for fix in found.fixes:
            by_file.setdefault(fix.path, {}).setdefault(fix.line, fix)
    texts = {path: _patched(_read(path), fixes) for path, fixes in by_file.items()}
    return {path: text for path, text in texts.items() if text != _read(path)}


def diff(texts: Mapping[Path, str], root: Path) -> str:
    """All changes as a unified diff, by paths below ``root``."""
    parts: list[str] = []
    for path, text in texts.items():
        name = path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path)
        before, after = (each.splitlines(keepends=True) for each in (_read(path), text))
        parts += difflib.unified_diff(before, after, f"a/{name}", f"b/{name}")
    return "".join(part if part.endswith("\n") else f"{part}\n" for part in parts)


def write(texts: Mapping[Path, str]) -> list[Path]:
    """Write the files; returns the backups of what was there.

    Raises:
        DoctorError: One cannot be written; those before it are.
    """
    backups = []
    for path, text in texts.items():
        try:
            backup = _free_name(path)
            shutil.copy2(path, backup)
            backups.append(backup)
            _replace(path, text)
        except OSError as error:
            raise DoctorError(f"{path} cannot be written: {error.strerror or error}.") from error
    return backups


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


def _replace(path: Path, text: str) -> None:
    """Whole or not at all, with the mode that it had; a link stays one."""
    target = path.resolve()
    written = target.with_name(f".{target.name}.doctor")
    try:
        with written.open("x", encoding="utf-8", newline="") as file:
            file.write(text)
        shutil.copymode(target, written)
        os.replace(written, target)  # noqa: PTH105 - as it is named elsewhere
    finally:
        written.unlink(missing_ok=True)


def _free_name(path: Path) -> Path:
    for number in range(1000):
        name = f"{path.name}{_BACKUP}{f'.{number}' if number else ''}"
        if not (backup := path.with_name(name)).exists():
            return backup
    raise DoctorError(f"{path} has a thousand backups; remove some.")


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DoctorError(f"{path} cannot be read: {error}.") from error
