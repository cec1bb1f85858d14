import random

import pytest

from marserve.frontend.batching.learning.latency_model import LatencyModel
from marserve.frontend.batching.lengths.length_costs import CostsByLength, LengthCosts


def padded(size: int, longest: float) -> float:
    return 0.008 + 0.00002 * size * longest


def learnt(batches: int = 100, noise: float = 0.1, *, matters: bool = True) -> LengthCosts:
    costs, rng = LengthCosts(), random.Random(0)
    for _ in range(batches):
        size, longest = rng.randint(1, 16), 100.0 * rng.lognormvariate(0, 0.8)
        seconds = padded(size, longest if matters else 100.0) * rng.lognormvariate(0, noise)
        costs.observe(size, longest, seconds)
    return costs


def test_what_batches_cost_is_found_through_noise():
    costs = learnt()
    for size, longest in [(1, 50.0), (4, 100.0), (16, 200.0)]:
        assert costs.seconds(size, longest) == pytest.approx(padded(size, longest), rel=0.15)
    assert costs.explained > 0.9
    assert costs.spread > 0.2


def test_lengths_that_do_not_matter_explain_nothing():
    costs = learnt(matters=False)
    assert costs.explained < 0.2
    assert costs.seconds(8, 50.0) == pytest.approx(costs.seconds(8, 400.0), rel=0.2)


def test_attention_costs_the_square():
    costs, rng = LengthCosts(), random.Random(0)
    for _ in range(100):
        size, longest = rng.randint(1, 8), float(rng.randint(10, 500))
        costs.observe(size, longest, 0.01 + 1e-7 * size * longest**2)
    assert costs.seconds(4, 400.0) == pytest.approx(0.01 + 4e-7 * 400.0**2, rel=0.1)


def test_before_much_is_known_padding_is_taken_to_cost_what_it_is():
    costs = LengthCosts()
    costs.observe(4, 100.0, 0.080)
    assert not costs.is_known
    assert costs.seconds(4, 100.0) == pytest.approx(0.080)
    assert costs.seconds(4, 300.0) == pytest.approx(0.160)


def test_without_lengths_nothing_breaks():
    costs = LengthCosts()
    for size in range(1, 100):
        costs.observe(size % 8 + 1, 0.0, 0.01)
    assert costs.explained == 0.0
    assert costs.seconds(3, 0.0) == pytest.approx(0.01, rel=0.05)


def test_the_costs_of_policies_are_those_of_the_batch_in_question():
    model, lengths = LatencyModel(), learnt()
    model.seed([(1, 0.01), (8, 0.02)])
    costs = CostsByLength(model, lengths)
    assert costs.mean(8) == model.mean(8)  # nothing is known of lengths yet
    costs.relearn()
    costs.use_batch(8, 50.0)
    short = costs.mean(8)
    assert short == pytest.approx(padded(8, 50.0), rel=0.2)
    assert costs.bound(32) == costs.bound(8)  # the largest one
    # A job is in time if a tenth of the missing items may join it.
    assert short < costs.until_answered(28) < 1.3 * short
    costs.use_batch(8, 400.0)
    assert costs.mean(8) == pytest.approx(padded(8, 400.0), rel=0.2)
    costs.use_job(400.0)
    assert costs.mean(1) == pytest.approx(padded(1, 400.0), rel=0.2)
    assert costs.mean(8) == pytest.approx(padded(8, lengths.typical), rel=0.2)
    assert costs.as_reference(8, lengths.typical, 0.03) == pytest.approx(0.03, rel=0.1)
    costs.forget()
    assert costs.mean(8) == model.mean(8)


def test_as_long_as_all_run_alone_batches_are_taken_to_pay():
    """Else none would ever run, and nothing would be learnt of them."""
    costs = LengthCosts()
    for longest in range(10, 1000, 10):
        costs.observe(1, float(longest), padded(1, longest))
    assert costs.seconds(8, 100.0) < 0.8 * 8 * costs.seconds(1, 100.0)
