"""A run may take longer than other tests may."""

import pytest

from chaos.campaign import OVERHEAD_SECONDS


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give it its time."""
    for item in items:
        if item.get_closest_marker("chaos"):
            seconds = item.config.getoption("--chaos-seconds") + OVERHEAD_SECONDS
            item.add_marker(pytest.mark.timeout(seconds))
