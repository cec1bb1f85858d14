import random

import pytest

from marserve.frontend.batching.lengths.length_relation import LengthRelation


def tokens(seen: float) -> float:
    """A third of the bytes, without a head of JSON, and cut."""
    return min(512.0, max(1.0, (seen - 30) / 3))


def test_a_relation_is_learnt_from_pairs():
    relation, rng = LengthRelation(), random.Random(0)
    changes = []
    for _ in range(400):
        seen = 30 + 300 * rng.lognormvariate(0, 1)
        changes.append(relation.learn(seen, round(tokens(seen) * rng.lognormvariate(0, 0.1))))
    assert changes.count(True) == 1
    assert relation.is_used
    assert relation.explained > 0.9
    for seen in (100.0, 300.0, 1000.0):
        assert relation.length(seen) == pytest.approx(tokens(seen), rel=0.25)
    assert relation.length(4000.0) == pytest.approx(relation.length(3000.0), rel=0.2)  # both cut


def test_it_never_falls():
    relation, rng = LengthRelation(), random.Random(0)
    for _ in range(200):
        seen = rng.uniform(1, 5000)
        relation.learn(seen, seen * rng.lognormvariate(0, 0.6))
    lengths = [relation.length(float(seen)) for seen in range(1, 6000, 7)]
    assert lengths == sorted(lengths)


def test_where_bytes_say_nothing_they_stay_the_length():
    relation, rng = LengthRelation(), random.Random(0)
    for _ in range(300):
        assert not relation.learn(rng.uniform(40, 60), rng.uniform(1, 1000))
    assert relation.explained < 0.5
    assert relation.length(50.0) == 50.0
    assert "explains" in relation.why


def test_empty_inputs_are_as_long_as_they_are_said_to_be():
    relation = LengthRelation()
    relation.learn(0.0, 3.0)
    relation.learn(0.0, 3.0)
    for seen in range(1, 200):
        relation.learn(float(seen), 3.0 + seen)
    assert relation.is_used
    assert relation.length(0.0) == pytest.approx(3.0, abs=0.5)


def test_what_is_constant_explains_nothing():
    relation = LengthRelation()
    for _ in range(100):
        assert not relation.learn(50.0, 7.0)


def test_a_relation_that_is_lost_is_used_no_more():
    relation, rng = LengthRelation(), random.Random(0)
    for _ in range(100):
        seen = rng.uniform(10, 1000)
        relation.learn(seen, seen / 4)
    assert relation.is_used
    for _ in range(1000):
        relation.learn(rng.uniform(10, 1000), rng.uniform(10, 1000))
    assert not relation.is_used
