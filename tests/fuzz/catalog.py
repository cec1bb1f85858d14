"""All targets, and the inputs that they start from: small files, one folder for each target."""

from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).with_name("corpus")
_TARGETS = Path(__file__).with_name("targets")
#: The names of all targets.
NAMES = tuple(sorted(path.stem for path in _TARGETS.glob("[!_]*.py")))


@cache
def load(name: str) -> ModuleType:
    """The module of a target: its function ``target``, and its ``LIMITS``."""
    return import_module(f"fuzz.targets.{name}")


@cache
def seeds(name: str) -> Mapping[str, bytes]:
    """The corpus of a target by the names of the files, smallest first."""
    paths = sorted(FOLDER.joinpath(name).iterdir(), key=lambda path: path.stat().st_size)
    return {path.name: path.read_bytes() for path in paths}


@cache
def words(name: str) -> Sequence[bytes]:
    """Words of the format that a target reads, for mutations; from the file ``NAME.dict``."""
    path = FOLDER / f"{name}.dict"
    if not path.exists():
        return ()
    lines = path.read_bytes().split(b"\n")
    return [_word(line) for line in lines if line and not line.startswith(b"#")]


def _word(line: bytes) -> bytes:
    """A line of a dictionary of libFuzzer's: a text in quotes, with escapes."""
    return line.strip()[1:-1].decode("unicode_escape").encode("latin-1")
