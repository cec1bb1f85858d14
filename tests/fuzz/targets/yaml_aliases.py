"""YAML whose aliases and merges refer to one another: little text that may grow to a lot."""

from fuzz.choices import Choices
from fuzz.limits import Limits
from fuzz.targets import model_yaml

# A byte makes up to six of text.
LIMITS = Limits(calls=8_000, calls_per_byte=800, memory_per_byte=20_000)
_MAX_LINES = 12


def target(data: bytes) -> None:
    """Its cost grows with its length, as all YAML is read by one function."""
    choices = Choices(data)
    lines = ["a0: &a0 {x: 1}"]
    while not choices.is_empty and len(lines) < _MAX_LINES:
        lines.append(_line(choices, len(lines)))
    model_yaml.target("\n".join(lines).encode())


def _line(choices: Choices, number: int) -> str:
    """A line that refers to those above it."""
    kind = choices.number(6)
    names = [f"*a{number - 1 - choices.number(number)}" for _ in range(choices.number(12))]
    several = ", ".join(names)
    values = (
        f"[{several}]",
        f"{{<<: [{several}]}}",
        f"{{<<: [{several}], y{number}: 1}}",
        f"{{x: [{several}]}}",
        f"{{? [{several}] : 1}}",
        f"{{<<: *a{number - 1}, <<: *a0}}",
    )
    return f"a{number}: &a{number} {values[kind]}"
