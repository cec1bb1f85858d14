"""All targets, and the inputs that they start from: small files, one folder for each target."""

from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

WORDS = Path(__file__).with_name("words.dict")
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
    files = {path.name: path.read_bytes() for path in FOLDER.joinpath(name).iterdir()}
    return dict(sorted(files.items(), key=lambda item: (len(item[1]), item[0])))


@cache
def words() -> Sequence[bytes]:
    """What the formats are made of, for mutations."""
    lines = WORDS.read_text("ascii").splitlines()
    return [_word(line) for line in lines if not line.startswith("#")]


def _word(line: str) -> bytes:
    """A line of a dictionary of libFuzzer's: a text in quotes, with escapes."""
    return line[1:-1].encode().decode("unicode_escape").encode("latin-1")
