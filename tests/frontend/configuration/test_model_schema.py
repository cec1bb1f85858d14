import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marserve.frontend.batching.jobs import Priority
from marserve.frontend.batching.options import Batching
from marserve.frontend.configuration.model_schema import (
    BATCHING,
    BY_KEY,
    BY_SPELLING,
    LIVE,
    PRIORITIES,
    SETTINGS,
)
from marserve.frontend.configuration.other_servers import FOREIGN_NAMES
from marserve.frontend.configuration.setting import (
    Fields,
    camel_case,
    read_settings,
)

WHOLE_OR_AUTO = "a whole number, 1 or more, or auto"
FROM_0 = "a whole number, 0 or more"
FROM_1 = "a whole number, 1 or more"
SIZES = "a list of whole numbers, rising, each 1 or more; empty for any size"


def test_priorities_are_those_that_the_batching_knows():
    """The configuration stands below the batching, and cannot ask it."""
    assert [name.upper() for name in PRIORITIES] == [each.name for each in Priority]
    assert [each.value for each in Priority] == [0, 1, 2]  # positions, as the settings have them


def read_keys(values: dict[str, Any], *on_wrong: Any) -> Fields:
    return read_settings(BATCHING, values, *on_wrong)


def test_no_two_settings_share_a_name():
    names = [name for row in SETTINGS for name in {*row.parameters, *row.keys}]
    assert len(names) == len(set(names))
    assert BY_KEY.keys() == {key for row in SETTINGS for key in row.keys}
    assert set(names) <= {*BY_SPELLING, *(row.parameter for row in SETTINGS)}
    assert not {*names} & {*FOREIGN_NAMES, *map(camel_case, FOREIGN_NAMES)}


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
        ("priorityQueueSizes", {"high": 1, "low": 9}, {"capacities": {0: 1, 2: 9}}),
        ("isolateFailures", False, {"isolates": False}),
        ("retryOnWorkerDeath", True, {"retries": True}),
        ("dynamicBatchSize", True, {"splits_lists": True}),
        ("batchDim", 1, {"batch_dims": (1, 1)}),
        ("batchDim", [0, 2], {"batch_dims": (0, 2)}),
    ],
)
def test_a_value_becomes_attributes_of_the_batching(key, value, attributes):
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
        ("batchDim", -1, "a whole number from 0 to 63, or a list of two"),
        ("batchDim", 64, "a whole number"),
        ("batchDim", [0], "a list of two"),
        ("batchDim", [0, True], "a list of two"),
    ],
)
def test_a_wrong_value_is_refused_with_name_value_and_rule(key, value, rule):
    with pytest.raises(ValueError, match=rf"^{key}=.*: it is .*\.$") as refused:
        read_keys({key: value})
    assert rule in str(refused.value)


def test_what_is_absent_or_null_says_nothing():
    assert read_keys({"batchSize": None, "handler": {"batchSize": "odd"}}) == {}


def test_a_field_may_have_both_its_names_if_they_agree():
    assert read_keys({"batchSize": 4, "maxBatchSize": 4})["size"] == 4
    with pytest.raises(
        ValueError, match="batchSize and maxBatchSize are names of the same setting"
    ):
        read_keys({"batchSize": 4, "maxBatchSize": "auto"})


def test_a_wrong_value_may_be_passed_over():
    wrong_values = []
    found = read_keys(
        {"batchSize": 0, "maxBatchSize": 3}, lambda *wrong: wrong_values.append(wrong)
    )
    assert found["size"] == 3
    assert wrong_values == [(BY_KEY["batchSize"], "batchSize", 0)]


def test_a_long_value_is_formatted_in_short():
    with pytest.raises(ValueError, match="batchPolicy=") as refused:
        read_keys({"batchPolicy": "x" * 10_000})
    assert len(str(refused.value)) < 200


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just("auto"),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.just("high"), inner),
)


@given(st.sampled_from(BATCHING), JSON)
def test_any_value_is_read_or_refused(row, value):
    with contextlib.suppress(ValueError):
        found = read_settings([row], {row.key: value})
        Batching(**found)
        assert found.get("delay", 0) >= 0
        assert found.get("size", 1) >= 1


def test_what_changes_live_has_a_name_in_requests():
    assert {row.parameter for row in LIVE} >= {
        "batch_size",
        "max_batch_delay",
        "batch_policy",
        "max_latency_ms",
        "num_requests",
        "compiled_batch_sizes",
        "job_queue_size",
    }
    assert all("request" in row.sources for row in LIVE)
