import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marserve.frontend.batching.lengths.length_costs import Row
from marserve.frontend.batching.lengths.length_grouping import cheapest_batches


def padded(overhead: float, limit: int) -> list[Row]:
    """A batch costs its overhead and each item as much as the longest."""
    return [(size, overhead, float(size), 0.0) for size in range(1, limit + 1)]


def cost(rows: list[Row], lengths: list[float], batches: list[range]) -> float:
    total = 0.0
    for batch in batches:
        _, p, q, r = rows[len(batch) - 1]
        longest = lengths[batch[-1]]
        total += p + q * longest + r * longest**2
    return total


def test_short_ones_do_not_wait_for_a_long_one():
    batches = cheapest_batches([1.0, 1.0, 1.0, 100.0], padded(5.0, 8))
    assert sorted(map(list, batches)) == [[0, 1, 2], [3]]


def test_where_a_batch_costs_more_than_padding_all_go_together():
    assert cheapest_batches([1.0, 2.0, 3.0], padded(50.0, 8)) == [range(3)]


def test_no_batch_is_larger_than_allowed():
    assert max(map(len, cheapest_batches([1.0] * 100, padded(5.0, 8)))) == 8


@given(
    lengths=st.lists(st.integers(0, 30).map(float), min_size=1, max_size=8).map(sorted),
    overhead=st.integers(0, 40).map(float),
    limit=st.integers(1, 8),
)
def test_no_other_cut_is_cheaper(lengths, overhead, limit):
    rows = padded(overhead, limit)
    found = cheapest_batches(lengths, rows)
    assert sorted(itertools.chain.from_iterable(found)) == list(range(len(lengths)))
    count = len(lengths)
    others = []
    for cuts in itertools.product((False, True), repeat=count - 1):
        ends = [place for place, cut in enumerate(cuts, 1) if cut] + [count]
        batches = [range(*pair) for pair in itertools.pairwise([0, *ends])]
        if max(map(len, batches)) <= limit:
            others.append(cost(rows, lengths, batches))
    assert cost(rows, lengths, found) == pytest.approx(min(others))


def test_of_a_long_queue_only_some_sizes_are_tried():
    lengths = [float(place) for place in range(512)]
    batches = cheapest_batches(lengths, padded(300.0, 100))
    assert sum(map(len, batches)) == 512
    assert {len(batch) for batch in batches} <= {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 100}
