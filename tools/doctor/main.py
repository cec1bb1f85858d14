"""``marserve doctor`` from the command line to the exit status."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from marserve.frontend.configuration.config import LOG4J_FILE
from marserve.frontend.configuration.properties import ConfigError, parse_properties
from marserve.frontend.lifecycle.terminal import print_text
from marserve.tools.bench.errors import BenchError
from marserve.tools.doctor.comparison.main import main as compare
from marserve.tools.doctor.errors import DoctorError
from marserve.tools.doctor.examination import examine
from marserve.tools.doctor.findings import Report
from marserve.tools.doctor.loading import load_archives
from marserve.tools.doctor.options import read_options
from marserve.tools.doctor.patches import diff, patches, write
from marserve.tools.doctor.report import as_json, as_text, exit_status
from marserve.tools.doctor.running import examine_server
from marserve.tools.doctor.sources import Kind, Source, decode, find_sources
from marserve.tools.doctor.surroundings import Surroundings
from marserve.tools.files import read_file

_COMPARE = "--compare"  # has a separate parser and excludes other modes
_UNUSABLE = 2
_INTERRUPTED = 130  # 128 + SIGINT, as in shells


def main(arguments: Sequence[str]) -> int:
    """Run ``marserve doctor``; return the exit status.

    Args:
        arguments: The arguments after ``doctor``.
    """
    try:
        if _COMPARE in arguments:
            return compare([each for each in arguments if each != _COMPARE])
        options = read_options(arguments)
        report = _report(options)
        return _print_report(report, options)
    except (BenchError, DoctorError) as error:
        print_text(f"marserve doctor: {error}", sys.stderr)
        return _UNUSABLE
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:  # the reader has closed the pipe
        return _UNUSABLE


def _report(options: argparse.Namespace) -> Report:
    if options.url is not None:
        report = examine_server(options)
    else:
        root, sources = _sources(options)
        around = Surroundings(root, image=options.image, is_here=options.ts_config is not None)
        report = examine(sources, around)
        if options.load:
            report.findings += load_archives(sources, options.ts_config, options.load_timeout)
    kept = [each for each in report.findings if each.rule not in options.ignore]
    report.ignored = len(report.findings) - len(kept)
    report.findings = kept
    return report


def _sources(options: argparse.Namespace) -> tuple[Path, list[Source]]:
    """Return the root and the sources to read.

    Raises:
        DoctorError: No source exists.
    """
    if options.ts_config is not None:
        path = options.ts_config
        if not os.path.exists(path):  # noqa: PTH110 - raises nothing
            raise DoctorError(f"The configuration file {path} does not exist.")
        return path.parent, [Source(path, str(path), Kind.PROPERTIES), *_beside(path)]
    root = options.path or Path()
    if not os.path.exists(root):  # noqa: PTH110 - raises nothing
        raise DoctorError(f"{root} does not exist.")
    sources = [*find_sources(root)]
    if not sources:
        raise DoctorError(
            f"{root.absolute()} contains no TorchServe files: no archive, configuration, image, "
            "manifest or handler."
        )
    return (root if root.is_dir() else root.parent), sources


def _beside(config: Path) -> list[Source]:
    """Return the files that a configuration names: archives of its store, logs, metrics."""
    try:
        values = parse_properties(decode(read_file(config))[0])
    except (OSError, ValueError, ConfigError):
        return []
    store = Path(values.get("model_store") or "-")
    stored = find_sources(store) if os.path.isdir(store) else ()  # noqa: PTH112 - raises nothing
    found = [source for source in stored if source.kind is Kind.ARCHIVE]
    java = map(LOG4J_FILE.fullmatch, values.get("vmargs", "").split())
    logs = [values.get("log_config", ""), *(match[1] for match in java if match)]
    files = {Kind.YAML: [values.get("metrics_config", "")], Kind.LOG4J: logs}
    return found + [
        Source(Path(name), name, kind)
        for kind, names in files.items()
        for name in names
        if os.path.exists(name)  # noqa: PTH110 - raises nothing
    ]


def _print_report(report: Report, options: argparse.Namespace) -> int:
    status = exit_status(report, strict=options.strict)
    if options.json:
        print_text(as_json(report, status))
    else:
        for line in as_text(report, verbose=options.verbose):
            print_text(line)
    if options.write:
        _write(report, options)
    return status


def _write(report: Report, options: argparse.Namespace) -> None:
    changes = patches(report.findings)
    root = options.path or Path()
    if not changes:
        _note("--write has nothing to fix", options)
        return
    if not options.json:
        print_text(f"\n{diff(changes, root if root.is_dir() else root.parent)}")
    if not options.yes and not _is_wanted(len(changes)):
        _note("nothing was written", options)
        return
    for each, backup in zip(changes, write(changes), strict=True):
        _note(f"wrote {each.path}; the original is {backup.name}", options)


def _is_wanted(count: int) -> bool:
    """Ask at the terminal.

    Raises:
        DoctorError: Standard input is not a terminal.
    """
    if not sys.stdin.isatty():
        raise DoctorError(
            "Nothing was written, because standard input is not a terminal. Use --yes to write."
        )
    files = "this file" if count == 1 else f"these {count} files"
    try:
        answer = input(f"Write {files}? [y/N] ")
    except EOFError:
        return False
    return answer.strip().lower() in ("y", "yes")


def _note(sentence: str, options: argparse.Namespace) -> None:
    print_text(f"{sentence}.", sys.stderr if options.json else sys.stdout)
