"""YAML whose aliases and merges refer to one another: little text that may grow to a lot."""

from fuzz.choices import Choices
from fuzz.limits import Limits
from fuzz.targets import model_yaml

# A short text may stand for 100,000 values, each of which costs a few calls.
LIMITS = Limits(calls=600_000, calls_per_byte=800, memory=64 << 20)
_MAX_LINES = 12


def target(data: bytes) -> None:
    """Its cost grows with its length, as all YAML is read by one function."""
    choices = Choices(data)
    lines = ["m0: &m0 {x: 1}"]
    names = {"m": ["m0"], "l": ["m0"]}  # mappings, which can be merged, and all that lists can have
    while not choices.is_empty and len(lines) < _MAX_LINES:
        lines.append(_line(choices, names))
    model_yaml.target("\n".join(lines).encode())


def _line(choices: Choices, names: dict[str, list[str]]) -> str:
    """A line that refers to those above it."""
    is_merge = choices.flag()
    known = names["m" if is_merge else "l"]
    count = choices.number(12)
    several = ", ".join(f"*{known[-1 - choices.number(len(known))]}" for _ in range(count))
    number = len(names["l"])
    if not is_merge:
        names["l"].append(f"l{number}")
        return f"l{number}: &l{number} [{several}]"
    for kind in names:
        names[kind].append(f"m{number}")
    own = f", y{number}: 1" if choices.flag() else ""
    return f"m{number}: &m{number} {{<<: [{several}]{own}}}"
