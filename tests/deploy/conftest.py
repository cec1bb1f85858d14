"""Fixtures around `container`."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from deploy.container import Container


@pytest.fixture
def container(tmp_path: Path) -> Iterator[Container]:
    """A container that runs nothing yet; it ends with the test."""
    made = Container(tmp_path)
    yield made
    made.close()
