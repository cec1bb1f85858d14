"""docs/security.md, held against the configuration: its table of limits and the sample file.

Which key each request needs is asked of a server: ``integration/test_security_page.py``.
"""

import re
from pathlib import Path

import pytest

from marserve.frontend.configuration.config import KEYS

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
SAMPLE = (ROOT / "config.properties").read_text(encoding="utf-8")
# What a key that bounds something is called.
LIMIT = re.compile(
    r"max_|_timeout$|_rate$|_size$|_seconds$|_kept$|_grace$|_limit|^limit_|_expiration_"
)


def limits() -> dict[str, str]:
    """Key to default, of the table of limits."""
    table = PAGE.partition("\n| Key | Default |")[2].partition("\n\n")[0]
    return dict(re.findall(r"^\| `(\w+)` \| `?([^|`]*?)`? \|", table, re.MULTILINE))


def test_every_limit_of_the_configuration_is_in_the_table() -> None:
    assert {key for key in KEYS if LIMIT.search(key)} - limits().keys() == set()


@pytest.mark.parametrize("key", sorted(limits()))
def test_a_limit_has_the_default_of_the_configuration_and_of_the_sample(key: str) -> None:
    assert limits()[key] == (KEYS[key].default or "")
    assert re.search(rf"^#{key}={re.escape(limits()[key])}$", SAMPLE, re.MULTILINE)
