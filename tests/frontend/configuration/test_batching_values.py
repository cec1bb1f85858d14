import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marserve.frontend.batching.jobs import Priority
from marserve.frontend.batching.options import Batching
from marserve.frontend.configuration.batching_values import (
    _PRIORITIES,
    FIELDS,
    LIVE_FIELDS,
    READERS,
    read_field,
    read_keys,
)

WHOLE_OR_AUTO = "a whole number, 1 or more, or auto"
FROM_0 = "a whole number, 0 or more"
FROM_1 = "a whole number, 1 or more"
SIZES = "a list of whole numbers, rising, each 1 or more; empty for any size"


def test_priorities_are_those_that_the_batching_knows() -> None:
    """The configuration stands below the batching, and cannot ask it."""
    assert [name.upper() for name in _PRIORITIES] == [one.name for one in Priority]


def test_no_two_fields_share_a_name() -> None:
    names = [name for one in FIELDS for name in (*one.parameters, *one.keys)]
    assert len(names) == len(set(names))
    assert READERS.keys() == {key for one in FIELDS for key in one.keys}


@pytest.mark.parametrize(
    ("key", "value", "attributes"),
    [
        ("batchSize", 8, {"size": 8, "is_automatic": False}),
        ("maxBatchSize", 2**31 - 1, {"size": 2**31 - 1, "is_automatic": False}),
        ("batchSize", "auto", {"is_automatic": True}),
        ("maxBatchDelay", 0, {"delay": 0.0}),
        ("maxBatchDelay", 35, {"delay": 0.035}),
        ("batchPolicy", "fixed_or_single", {"policy": "fixed_or_single"}),
        ("maxLatencyMs", 50, {"max_latency": 0.05}),
        ("numRequests", 0, {"num_requests": 0}),
        ("compiledBatchSizes", [1, 4, 8], {"compiled_sizes": (1, 4, 8)}),
        ("compiledBatchSizes", [], {"compiled_sizes": ()}),
        ("jobQueueSize", 1, {"queue_size": 1, "is_queue_bounded": True}),
        ("priorityQueueSizes", {"high": 1, "low": 9}, {"seats": {"high": 1, "low": 9}}),
        ("isolateFailures", False, {"isolates": False}),
        ("retryOnWorkerDeath", True, {"retries": True}),
        ("dynamicBatchSize", True, {"splits_lists": True}),
    ],
)
def test_a_value_becomes_attributes_of_the_batching(
    key: str, value: Any, attributes: dict[str, Any]
) -> None:
    assert read_keys({key: value}) == attributes
    Batching(**attributes)  # there are such attributes


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("batchSize", 0, WHOLE_OR_AUTO),
        ("batchSize", -1, WHOLE_OR_AUTO),
        ("batchSize", "8", WHOLE_OR_AUTO),
        ("batchSize", True, WHOLE_OR_AUTO),
        ("batchSize", 2.0, WHOLE_OR_AUTO),
        ("batchSize", 2**31, WHOLE_OR_AUTO),
        ("maxBatchSize", "Auto", WHOLE_OR_AUTO),
        ("maxBatchDelay", -1, FROM_0),
        ("maxBatchDelay", 0.5, FROM_0),
        ("batchPolicy", "best", "one of fixed, greedy, adaptive, fixed_or_single"),
        ("batchPolicy", 1, "one of fixed, greedy, adaptive, fixed_or_single"),
        ("maxLatencyMs", -5, FROM_0),
        ("maxLatencyMs", "50", FROM_0),
        ("numRequests", False, FROM_0),
        ("compiledBatchSizes", 4, SIZES),
        ("compiledBatchSizes", "1,4", SIZES),
        ("compiledBatchSizes", [0, 4], SIZES),
        ("compiledBatchSizes", ["4"], SIZES),
        ("compiledBatchSizes", list(range(1, 100)), SIZES),
        ("jobQueueSize", 0, FROM_1),
        ("priorityQueueSizes", {"urgent": 1}, "a map of high, normal, low to whole numbers"),
        ("priorityQueueSizes", {"high": 0}, "a map of high, normal, low to whole numbers"),
        ("priorityQueueSizes", 5, "a map of high, normal, low to whole numbers"),
        ("isolateFailures", 1, "true or false"),
        ("retryOnWorkerDeath", "no", "true or false"),
        ("dynamicBatchSize", "true", "true or false"),
    ],
)
def test_what_is_wrong_is_told_with_name_value_and_rule(key: str, value: Any, rule: str) -> None:
    with pytest.raises(ValueError, match=rf"^{key}=.*: it is .*\.$") as refused:
        read_keys({key: value})
    assert rule in str(refused.value)


def test_what_is_absent_or_null_says_nothing() -> None:
    assert read_keys({"batchSize": None, "handler": {"batchSize": "odd"}}) == {}


def test_a_field_may_have_both_its_names_if_they_agree() -> None:
    assert read_keys({"batchSize": 4, "maxBatchSize": 4})["size"] == 4
    with pytest.raises(ValueError, match="batchSize and maxBatchSize are names of the same thing"):
        read_keys({"batchSize": 4, "maxBatchSize": "auto"})


def test_who_is_told_of_a_wrong_value_may_pass_over_it() -> None:
    told: list[Any] = []
    said = read_keys({"batchSize": 0, "maxBatchSize": 3}, lambda *wrong: told.append(wrong))
    assert said["size"] == 3
    assert told == [("batchSize", 0, WHOLE_OR_AUTO)]


def test_a_long_value_is_told_in_short() -> None:
    with pytest.raises(ValueError, match="batchPolicy=") as refused:
        read_keys({"batchPolicy": "x" * 10_000})
    assert len(str(refused.value)) < 200


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just("auto"),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.just("high"), inner),
)


@given(st.sampled_from(FIELDS), JSON)
def test_any_value_is_read_or_refused(one: Any, value: Any) -> None:
    with contextlib.suppress(ValueError):
        said = read_field(one.read, one.keys, {one.key: value})
        Batching(**said)
        assert said.get("delay", 0) >= 0
        assert said.get("size", 1) >= 1


def test_what_changes_live_has_a_name_in_requests() -> None:
    assert [one.parameter for one in LIVE_FIELDS] == [
        "batch_size",
        "max_batch_delay",
        "batch_policy",
        "max_latency_ms",
        "num_requests",
        "compiled_batch_sizes",
        "job_queue_size",
    ]
