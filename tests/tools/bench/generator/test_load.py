"""How a load is shared out between processes."""

import pytest

from marserve.tools.bench.generator.load import Load


@pytest.mark.parametrize("processes", [1, 2, 3, 7])
def test_the_shares_add_up_to_the_whole(processes):
    closed = Load(clients=10, requests=101).shared(processes)
    assert sum(item.clients or 0 for item in closed) == 10
    assert sum(item.requests or 0 for item in closed) == 101
    opened = Load(rate=70.0, seconds=3, max_connections=100).shared(processes)
    assert sum(item.rate or 0 for item in opened) == pytest.approx(70)
    assert sum(item.max_connections for item in opened) == 100
    assert len(closed) == len(opened) == processes


def test_no_process_is_without_work():
    assert len(Load(clients=2, seconds=1).shared(8)) == 2
    assert len(Load(clients=8, requests=3).shared(8)) == 3


def test_a_rate_is_not_made_a_number_of_clients():
    (whole,) = Load(rate=5.0, seconds=1).shared(1)
    assert whole.clients is None
    assert whole.requests is None
