"""The program of a helper process, which does work whose cost untrusted files determine.

Its memory is limited, and so is its processor time except for unpacking. The server can kill it at
any time (`helper_process`).

It reads one JSON object from stdin: the operation's name and its arguments. It writes an empty line
at most every second while it makes progress, then one line with a JSON object, the answer.
"""

import json
import logging
import resource
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from marserve.backend.processes.runner import die_with_parent
from marserve.frontend.archives.contents import read_contents, read_workflow_contents
from marserve.frontend.archives.local_files import (
    copy_file,
    find_model,
    find_workflow,
    link_directory,
)
from marserve.frontend.archives.requirements_digest import requirements_digest
from marserve.frontend.archives.unpack import ArchiveLimits, unpack
from marserve.frontend.errors import ArchiveRefused, ServeError

MAX_ANSWER_BYTES = 1 << 18
_MAX_MEMORY_BYTES = 3 << 27
_UNKNOWN_MEMORY_BYTES = 1 << 30  # assumed for the interpreter where /proc does not tell
_READING_SECONDS = 10  # of processor time, for files of at most a megabyte
_PROGRESS_SECONDS = 1.0
_MAX_LOGGED = 20  # lines
_MAX_LINE = 2000  # characters

_last_progress = time.monotonic()


def main() -> None:
    """Perform the operation that stdin describes."""
    die_with_parent()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _limit(resource.RLIMIT_AS, _own_memory() + _MAX_MEMORY_BYTES)
    records = _Records()
    logging.basicConfig(handlers=[records], level=logging.INFO)
    request = json.loads(sys.stdin.read())
    try:
        answer = {"result": _OPERATIONS[request["operation"]](request)}
    except ServeError as error:
        answer = {"refused": type(error).__name__, "message": error.message}
    except MemoryError:
        answer = _refused(
            f"Reading the archive takes more than {_MAX_MEMORY_BYTES} bytes of memory."
        )
    except RecursionError:
        answer = _refused("The archive is nested too deep to be read.")
    except OSError as error:
        answer = {"failed": [error.errno, error.strerror or str(error), error.filename]}
    text = json.dumps(answer | {"log": records.lines}, default=str)
    if len(text) > MAX_ANSWER_BYTES:
        sentence = f"Manifest and settings of the archive exceed {MAX_ANSWER_BYTES} bytes."
        text = json.dumps(_refused(sentence))
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _open(request: Mapping[str, Any]) -> dict[str, Any]:
    directory = root = Path(request["root"])
    source = _source(request, find_model)
    if source.is_dir():
        directory = link_directory(source, root)
    else:
        unpack(source, root, _limits(request))
    _limit_processor_time()
    contents = read_contents(
        directory, request["known_keys"], needs_requirements=request["needs_requirements"]
    )
    return {"directory": str(directory), "source": str(source), "contents": contents.as_json()}


def _unpack(request: Mapping[str, Any]) -> None:
    source, root = Path(request["source"]), Path(request["root"])
    if source.is_dir():
        link_directory(source, root)
    else:
        unpack(source, root, _limits(request))


def _open_workflow(request: Mapping[str, Any]) -> dict[str, Any]:
    root, source = Path(request["root"]), _source(request, find_workflow)
    unpack(source, root, _limits(request))
    _limit_processor_time()
    contents = read_workflow_contents(root)
    return {"directory": str(root), "source": str(source), "contents": asdict(contents)}


def _source(request: Mapping[str, Any], find: Callable[[str, Path], Path]) -> Path:
    return Path(request["source"] or find(request["url"], Path(request["store"])))


def _copy(request: Mapping[str, Any]) -> None:
    copy_file(Path(request["source"]), Path(request["target"]), _limits(request))


def _digest(request: Mapping[str, Any]) -> str:
    return requirements_digest(
        Path(request["directory"]), request["file"], request["settings"], _on_progress
    )


_OPERATIONS: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "open": _open,
    "open_workflow": _open_workflow,
    "unpack": _unpack,
    "copy": _copy,
    "digest": _digest,
}


def _limits(request: Mapping[str, Any]) -> ArchiveLimits:
    return ArchiveLimits(**request["limits"], on_progress=_on_progress)


def _on_progress() -> None:
    global _last_progress
    now = time.monotonic()
    if now - _last_progress >= _PROGRESS_SECONDS:
        _last_progress = now
        sys.stdout.write("\n")
        sys.stdout.flush()


def _limit_processor_time() -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(used.ru_utime + used.ru_stime) + _READING_SECONDS
    _limit(resource.RLIMIT_CPU, seconds)


def _limit(what: int, wanted: int) -> None:
    """Set a resource limit, unless the system's is lower."""
    _, hard = resource.getrlimit(what)
    if hard == resource.RLIM_INFINITY or wanted < hard:
        resource.setrlimit(what, (wanted, hard))


def _own_memory() -> int:
    """Return the address space of the interpreter, in bytes.

    Libraries that all processes of a container preload may reserve gigabytes.
    """
    try:
        pages = Path("/proc/self/statm").read_text().split()[0]
        return int(pages) * resource.getpagesize()
    except (OSError, LookupError, ValueError):  # blank or hidden
        return _UNKNOWN_MEMORY_BYTES


def _refused(sentence: str) -> dict[str, str]:
    return {"refused": ArchiveRefused.__name__, "message": sentence}


class _Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        if len(self.lines) < _MAX_LOGGED:
            self.lines.append((record.levelno, record.getMessage()[:_MAX_LINE]))


if __name__ == "__main__":
    main()
