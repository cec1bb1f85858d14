"""docs/reliability.md, compared with the tests, the logs, the metrics and the keys.

Each row of its tables is a promise::

    | Failure | Clients see | Operators see | How long |

failures.toml names the tests of each row, as paths below ``tests/``; pytest collects them.
In the third column, backticks contain a metric, or what a log has (``<...>`` stands for anything).
A key of the configuration is followed by its default in parentheses.
"""

import re
import tomllib
from functools import lru_cache
from pathlib import Path

import pytest

from marserve.frontend.configuration.config import KEYS
from marserve.frontend.telemetry.metrics import Metrics

ROOT = Path(__file__).parents[1]
PAGES = ("reliability.md", "security.md")
TESTS = tomllib.loads(Path(__file__).with_name("failures.toml").read_text(encoding="utf-8"))
METRIC = re.compile(r"((?:ts|marserve)_\w+)(?:\{\w+=\"(\w+)\"\})?")
# `request_head_timeout` (60 s)
DEFAULT = re.compile(r"`(\w+)`\s\((\d[\d,]*)(?:\s(?:s|bytes|minutes))?\)")


@lru_cache
def text(page: str) -> str:
    return (ROOT / "docs" / page).read_text(encoding="utf-8")


def promises() -> list[list[str]]:
    """Return the cells of each row."""
    lines = [line for line in text("reliability.md").splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [row for row in rows if row[0] != "Failure"]


@lru_cache
def sources() -> str:
    """Return the source code of the server, with implicitly joined strings joined."""
    files = sorted(
        file for folder in ("frontend", "backend") for file in (ROOT / folder).rglob("*.py")
    )
    code = "\n".join(file.read_text(encoding="utf-8") for file in files)
    return re.sub(r'"\s*\n\s*f?"', "", code)


def test_every_promise_has_tests():
    assert promises()
    assert [row for row in promises() if len(row) != 4] == []
    assert {row[0] for row in promises()} == TESTS["reliability"].keys()
    assert all(TESTS["reliability"].values())


def test_every_test_that_is_named_is_one_that_pytest_collects():
    named = {node for page in TESTS.values() for nodes in page.values() for node in nodes}
    files = {node.partition("::")[0] for node in named}
    found = {
        f"{file}::{name}"
        for file in files
        if Path(file).name.startswith("test_")
        for name in re.findall(
            r"^(?:async )?def (test_\w+)\(", (ROOT / "tests" / file).read_text(), re.MULTILINE
        )
    }
    assert named - found == set()


def test_what_operators_see_is_counted_or_logged():
    known = {*Metrics().config.ts, *re.findall(r'"(marserve_\w+)"', sources())}
    for row in promises():
        for name in re.findall(r"`([^`]+)`", row[2]):
            if metric := METRIC.fullmatch(name):
                assert metric[1] in known, name
                assert metric[2] is None or f'"{metric[2]}"' in sources(), name
                continue
            for piece in filter(None, map(str.strip, re.split(r"<[^>]*>", name))):
                assert piece in sources(), f"nothing writes {name!r}"


@pytest.mark.parametrize("page", PAGES)
def test_defaults_are_those_of_the_configuration(page):
    named = DEFAULT.findall(text(page))
    wrong = {
        (key, value)
        for key, value in named
        if key in KEYS and KEYS[key].default != value.replace(",", "")
    }
    assert wrong == set()
