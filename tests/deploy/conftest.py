"""Fixtures around `container`."""

import pytest
from deploy.container import Container


@pytest.fixture
def container(tmp_path):
    """A container that runs nothing yet; it ends with the test."""
    made = Container(tmp_path)
    yield made
    made.close()
