import math
from dataclasses import replace

import pytest

from marserve.frontend.batching.adaptive import Adaptive
from marserve.frontend.batching.learning.latency_model import LatencyModel
from marserve.frontend.batching.options import Batching, with_implied
from marserve.frontend.batching.policies import FixedOrSingle, FixedWindow, Greedy


def measured(*points: tuple[int, float]) -> LatencyModel:
    costs = LatencyModel()
    costs.seed(points)
    return costs


# -- contradictions --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"policy": "fastest"},
            "batch_policy=fastest: it is one of fixed, greedy, adaptive, fixed_or_single.",
        ),
        ({"size": 0}, "batch_size=0: a batch holds at least 1 request."),
        (
            {"policy": "greedy", "max_latency": 0.05},
            "max_latency_ms=50: only batch_policy=adaptive has a latency goal, not greedy.",
        ),
        (
            {"compiled_sizes": (4, 1), "size": 4},
            "compiled_batch_sizes=4,1: each is at least 1 and larger than the one before.",
        ),
        (
            {"compiled_sizes": (4, 4), "size": 4},
            "compiled_batch_sizes=4,4: each is at least 1 and larger than the one before.",
        ),
        (
            {"compiled_sizes": (0, 4), "size": 4},
            "compiled_batch_sizes=0,4: each is at least 1 and larger than the one before.",
        ),
        (
            {"compiled_sizes": (1, 4), "size": 8},
            "batch_size=8: the largest of compiled_batch_sizes=1,4 is all that the model can run.",
        ),
    ],
)
def test_a_contradiction_is_refused_with_field_value_and_rule(fields, message):
    with pytest.raises(ValueError) as refused:
        Batching(**fields).check()
    assert str(refused.value) == message


@pytest.mark.parametrize(
    "batching",
    [
        Batching(),
        Batching(policy="greedy", size=8),
        Batching(policy="adaptive", size=8, max_latency=0.05),
        Batching(policy="fixed_or_single", size=8, delay=0.0),
        Batching(size=4, compiled_sizes=(1, 4, 8)),
        Batching(size=128, is_automatic=True, compiled_sizes=(1, 4)),
    ],
)
def test_what_goes_together_is_let_pass(batching):
    assert batching.check() is batching


def test_a_goal_below_what_a_request_takes_is_refused():
    batching = Batching(policy="adaptive", max_latency=0.005)
    with pytest.raises(ValueError) as refused:
        batching.checked_against(measured((1, 0.0123), (8, 0.05)))
    assert str(refused.value) == (
        "max_latency_ms=5: a single request takes 12.3 ms; the goal must not be below that."
    )


@pytest.mark.parametrize(
    ("goal", "costs"),
    [
        (0.0, measured((1, 0.1))),
        (0.1, measured((1, 0.1))),
        (0.001, LatencyModel()),
        # What eight take says nothing certain of one.
        (0.01, measured((8, 0.05))),
        (0.01, measured((8, 0.05), (16, 0.09))),
        (0.01, measured((2, 0.05))),
    ],
)
def test_only_what_is_known_stands_against_a_goal(goal, costs):
    batching = Batching(policy="adaptive", max_latency=goal)
    assert batching.checked_against(costs) is batching


# -- what follows ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "implied"),
    [
        ({}, {}),
        ({"delay": 0.2}, {"delay": 0.2}),
        ({"max_latency": 0.05}, {"max_latency": 0.05, "policy": "adaptive"}),
        ({"max_latency": 0.05, "policy": "fixed"}, {"max_latency": 0.05, "policy": "fixed"}),
        ({"max_latency": 0.0}, {"max_latency": 0.0}),
        ({"policy": "greedy"}, {"policy": "greedy", "max_latency": 0.0}),
        ({"policy": "adaptive"}, {"policy": "adaptive"}),
    ],
)
def test_what_follows_from_a_change(changes, implied):
    assert with_implied(changes) == implied


@pytest.mark.parametrize(
    ("fields", "max_size"),
    [
        ({"size": 8}, 8),
        ({"size": 8, "num_requests": 3}, 3),
        ({"size": 8, "num_requests": 30}, 8),
        ({"size": 128, "compiled_sizes": (1, 4)}, 4),
    ],
)
def test_the_largest_batch_there_can_be(fields, max_size):
    assert Batching(**fields).max_size == max_size


@pytest.mark.parametrize(("sizes", "runs"), [((), [1, 3, 5, 9]), ((2, 4, 8), [2, 4, 8, 9])])
def test_requests_run_as_the_next_compiled_size(sizes, runs):
    batching = Batching(compiled_sizes=sizes)
    assert [batching.run_as(size) for size in (1, 3, 5, 9)] == runs


def test_no_goal_is_an_infinite_one():
    assert (Batching().goal, Batching(max_latency=0.05).goal) == (math.inf, 0.05)


# -- the policy ------------------------------------------------------------------------------------


def test_each_name_makes_its_policy():
    settings = Batching(size=6, delay=0.2, num_requests=16, max_latency=0.5)
    costs = LatencyModel()
    made = {
        name: replace(settings, policy=name).make_policy(costs)
        for name in ("fixed", "greedy", "fixed_or_single", "adaptive")
    }
    assert made == {
        "fixed": FixedWindow(6, 0.2, 16, costs),
        "greedy": Greedy(6),
        "fixed_or_single": FixedOrSingle(6, 0.2, 16, costs),
        "adaptive": made["adaptive"],
    }
    adaptive = made["adaptive"]
    assert isinstance(adaptive, Adaptive)
    assert (adaptive.size, adaptive.costs, adaptive.goal) == (6, costs, 0.5)
    assert (adaptive.max_hold, adaptive.num_requests) == (0.2, 16)
