import contextlib
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marserve.frontend.batching.options import Batching
from marserve.frontend.configuration.model_schema import SETTINGS
from marserve.frontend.errors import BadRequest
from marserve.frontend.operations.describe import DESCRIBED
from marserve.frontend.operations.model_parameters import (
    changed_settings,
    format_settings,
    registered_settings,
)
from marserve.frontend.operations.parameters import Parameters
from marserve.frontend.rest.api_description import describe_listener
from marserve.frontend.settings.model_settings import resolve_settings

EIGHT = {"size": 8, "is_automatic": False}


@pytest.mark.parametrize("read", [registered_settings, changed_settings])
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, {}),
        ({"unknown": "1"}, {}),
        ({"batch_size": "8"}, EIGHT),
        ({"batch_size": 8}, EIGHT),
        ({"max_batch_size": " 8 "}, EIGHT),
        ({"batch_size": "8", "max_batch_size": 8}, EIGHT),
        ({"batch_size": "auto"}, {"is_automatic": True}),
        ({"compiled_batch_sizes": "1, 4,8"}, {"compiled_sizes": (1, 4, 8)}),
        ({"compiled_batch_sizes": [1, 4]}, {"compiled_sizes": (1, 4)}),
        ({"compiled_batch_sizes": ""}, {"compiled_sizes": ()}),
    ],
)
def test_what_a_request_says(read, values, expected):
    assert read(Parameters(values)) == expected


@pytest.mark.parametrize("read", [registered_settings, changed_settings])
@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"batch_size": "0"}, "batch_size=0: it is a whole number, 1 or more, or auto."),
        ({"max_batch_size": "4.5"}, "max_batch_size=4.5: "),
        ({"batch_size": "4", "max_batch_size": "5"}, "batch_size and max_batch_size are names of"),
        ({"batch_policy": ""}, "batch_policy=: it is one of fixed, greedy"),
        ({"max_latency_ms": "1e3"}, "max_latency_ms=1e3: it is a whole number, 0 or more."),
        ({"num_requests": {}}, "num_requests={}: "),
        ({"compiled_batch_sizes": "1;4"}, "compiled_batch_sizes=['1;4']: it is a list"),
        ({"compiled_batch_sizes": "1,,4"}, "compiled_batch_sizes=[1, '', 4]: "),
        ({"job_queue_size": "99999999999"}, "job_queue_size=99999999999: "),
    ],
)
def test_what_is_wrong_is_a_bad_request(read, values, words):
    with pytest.raises(BadRequest) as refused:
        read(Parameters(values))
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("batch_size", "-1"),
        ("batch_size", -1),
        ("batch_size", "many"),
        ("batch_size", ""),
        ("batch_size", "nan"),
        ("max_batch_delay", "-1"),
        ("max_batch_delay", -100),
        ("max_batch_delay", "soon"),
    ],
)
def test_torchserves_own_count_as_not_given_in_a_registration_only(name, value):
    values = Parameters({name: value, "num_requests": "2"})
    assert registered_settings(values) == {"num_requests": 2}
    with pytest.raises(BadRequest, match=f"{name}="):
        changed_settings(values)


@pytest.mark.parametrize("read", [registered_settings, changed_settings])
@pytest.mark.parametrize("name", ["batch_size", "max_batch_delay"])
@pytest.mark.parametrize("value", ["-5", -2, "4.5", 4.5, True, [], 2**31, "9" * 30, "9" * 5000])
def test_numbers_that_make_no_sense_are_refused(read, name, value):
    with pytest.raises(BadRequest, match=f"^{name}="):
        read(Parameters({name: value}))


ANY = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.integers())


@pytest.mark.parametrize("read", [registered_settings, changed_settings])
@given(values=st.dictionaries(st.sampled_from(["batch_size", "compiled_batch_sizes"]), ANY))
def test_any_value_is_read_or_refused(read, values):
    with contextlib.suppress(BadRequest):
        found = read(Parameters(values))
        assert found.get("size", 1) >= 1
        assert min(found.get("compiled_sizes") or (1,)) >= 1


def test_settings_are_formatted_as_they_are_asked_for(config):
    batching = Batching(
        policy="adaptive",
        size=128,
        is_automatic=True,
        delay=0.005,
        max_latency=0.05,
        num_requests=2,
        compiled_sizes=(1, 4),
        queue_size=7,
    )
    resolved = resolve_settings({}, {}, {}, config, gpus=0, default_workers=1)
    assert format_settings(replace(resolved, batching=batching)).startswith(
        "batch_size=auto, max_batch_delay=5, batch_policy=adaptive, max_latency_ms=50, "
        "num_requests=2, compiled_batch_sizes=1,4, job_queue_size=7"
    )


# -- the documents ---------------------------------------------------------------------------------

DOCUMENT = describe_listener(["Management"])
REGISTER = DOCUMENT["paths"]["/models"]["post"]
BODY = REGISTER["requestBody"]["content"]["application/json"]["schema"]["properties"]
CHANGE = DOCUMENT["paths"]["/models/{model_name}"]["put"]


def query_of(operation: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in operation["parameters"]}


@pytest.mark.parametrize("row", SETTINGS, ids=lambda row: row.name)
def test_the_documents_have_each_setting_where_requests_may_have_it(row):
    for name in row.parameters:
        is_scaling = name in ("min_worker", "max_worker")
        assert (name in query_of(REGISTER)) is (name in BODY) is ("request" in row.sources)
        assert (name in query_of(CHANGE)) is (row.is_live or is_scaling)


@pytest.mark.parametrize("row", DESCRIBED, ids=lambda row: row.name)
def test_the_documents_say_of_which_type_a_described_setting_is(row):
    schema = DOCUMENT["components"]["schemas"]["Model"]["properties"][row.key]
    expected = {"batchSize": "integer"}.get(row.key) or row.kind.schema.get("type")
    assert schema.get("type") == expected
    assert schema.get("anyOf") == (row.kind.schema.get("anyOf") if expected is None else None)


def test_what_torchserves_clients_send_for_not_given_is_allowed_in_a_registration_only():
    registered, changed = query_of(REGISTER), query_of(CHANGE)
    assert registered["max_batch_delay"]["schema"]["minimum"] == -100
    assert registered["response_timeout"]["schema"]["default"] == -1
    assert changed["max_batch_delay"]["schema"]["minimum"] == 0
