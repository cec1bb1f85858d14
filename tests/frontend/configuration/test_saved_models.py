import contextlib
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from served_models import saved_entry

from marserve.frontend.configuration.model_entry import ModelEntry
from marserve.frontend.configuration.model_schema import BATCH_POLICIES
from marserve.frontend.configuration.saved_models import saved_models, snapshot_json

#: As TorchServe 0.12.0 wrote it.
TORCHSERVE = """{
  "name": "20261120213709459-startup.cfg",
  "modelCount": 1,
  "created": 1795210629459,
  "models": {
    "probe": {
      "1.0": {
        "defaultVersion": true,
        "marName": "probe.mar",
        "minWorkers": 1,
        "maxWorkers": 2,
        "batchSize": 3,
        "maxBatchDelay": 70,
        "responseTimeout": 33,
        "startupTimeout": 120,
        "runtimeType": "python"
      }
    }
  }
}"""
PROBE = replace(saved_entry(), name="probe", url="probe.mar")


def snapshot(**changes: Any) -> str:
    """A snapshot of one model with other members; None leaves one out."""
    document = json.loads(TORCHSERVE)
    members = document["models"]["probe"]["1.0"] | changes
    document["models"]["probe"]["1.0"] = {
        key: value for key, value in members.items() if value is not None
    }
    return json.dumps(document)


def test_what_torchserve_wrote_is_read():
    (model,) = saved_models(TORCHSERVE)
    assert (model, model.is_default) == (PROBE, True)


def test_it_is_written_as_torchserve_wrote_it():
    name = "20261120213709459-startup.cfg"
    assert snapshot_json(name, 1795210629459, [PROBE]) == TORCHSERVE


def test_only_timeouts_and_runtime_may_be_missing():
    text = snapshot(responseTimeout=None, startupTimeout=None, runtimeType=None)
    (model,) = saved_models(text)
    assert model.settings == PROBE.settings | {"response_timeout": 120}
    assert model.runtime == "python"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("marName", None),
        ("marName", ""),
        ("marName", 7),
        ("minWorkers", None),
        ("minWorkers", -1),
        ("minWorkers", True),
        ("minWorkers", 1.5),
        ("minWorkers", 1001),
        ("maxWorkers", 0),
        ("maxWorkers", "two"),
        ("batchSize", 0),
        ("maxBatchDelay", "70 ms"),
        ("maxBatchDelay", None),
        ("responseTimeout", 0),
        ("responseTimeout", float("nan")),
        ("startupTimeout", -1),
        ("defaultVersion", "yes"),
        ("runtimeType", 3),
        ("handler", 3),
        ("batchSizeAuto", 1),
        ("batchPolicy", "best"),
        ("batchCosts", {}),
        ("batchCosts", [[1, 2.5]]),
        ("batchCosts", [[0, 2.5, 1]]),
        ("batchCosts", [[1, 0, 1]]),
        ("batchCosts", [[1, 2.5, True]]),
        ("batchCosts", [[1, 2.5, 1]] * 101),
    ],
)
def test_a_wrong_member_is_reported_with_its_model(key, value):
    with pytest.raises(ValueError, match=rf"^{key} of probe 1\.0 to be "):
        saved_models(snapshot(**{key: value}))


def test_the_largest_number_is_named():
    with pytest.raises(ValueError, match=r"^batchSize .* a whole number from 1 to 2147483647, "):
        saved_models(snapshot(batchSize=2**31))


def test_numbers_and_switches_may_be_texts_as_kserve_writes_them():
    numbers = {"minWorkers": 1, "maxWorkers": 2, "batchSize": 3, "maxBatchDelay": 70}
    texts = {key: str(number) for key, number in numbers.items()}
    text = snapshot(**texts, responseTimeout="33", startupTimeout=120.0, defaultVersion="true")
    text = text.replace('"modelCount": 1', '"modelCount": "1"')
    assert '"modelCount": "1"' in text
    assert saved_models(text) == saved_models(snapshot(**numbers, responseTimeout=33))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "the JSON that a snapshot holds"),
        ("{", "the JSON that a snapshot holds"),
        ("[" * 100_000, "the JSON that a snapshot holds"),
        ("[]", "the snapshot to be a JSON object"),
        ('{"models": []}', "models to be a JSON object"),
        ('{"models": {"m": 1}}', "models: m to be a JSON object"),
        ('{"models": {"m": {"1.0": 1}}}', "models: m 1.0 to be a JSON object"),
        ('{"modelCount": "one"}', "modelCount to be a whole number"),
    ],
)
def test_what_is_no_snapshot_is_reported(text, words):
    with pytest.raises(ValueError) as refused:
        saved_models(text)
    assert words in str(refused.value)


@pytest.mark.parametrize("count", [0, -3])
def test_a_count_of_no_models_counts(count):
    assert saved_models(TORCHSERVE.replace('"modelCount": 1', f'"modelCount": {count}')) == ()


def test_what_torchserve_does_not_know_is_behind_what_it_knows():
    ours = replace(
        PROBE,
        settings={
            **PROBE.settings,
            "is_automatic": True,
            "policy": "adaptive",
            "max_latency": 0.05,
        },
        batch_costs=((1.0, 0.0025, 9), (3.5, 0.004, 2)),
    )
    members = json.loads(snapshot_json("n", 1, [ours]))["models"]["probe"]["1.0"]
    known = json.loads(TORCHSERVE)["models"]["probe"]["1.0"]
    assert list(members) == [*known, "batchSizeAuto", "batchCosts", "batchPolicy", "maxLatencyMs"]
    assert members["batchCosts"] == [[1, 2.5, 9], [3.5, 4, 2]]
    assert saved_models(snapshot_json("n", 1, [ours])) == (ours,)


def test_never_wait_as_torchserve_spelt_it():
    (model,) = saved_models(snapshot(maxBatchDelay=-10000))
    assert model.settings["delay"] == 0


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
MEMBERS = st.sampled_from([*json.loads(snapshot())["models"]["probe"]["1.0"], "handler"])


@given(st.dictionaries(MEMBERS, JSON | st.integers(-1, 3), max_size=3))
def test_any_members_are_read_or_refused(members):
    try:
        models = saved_models(snapshot(**members))
    except ValueError:
        return
    for model in models:
        assert 0 <= model.workers[0] <= min(1000, model.workers[1])
        assert model.settings["delay"] >= 0
        numbers = [model.settings[name] for name in ("size", "response_timeout", "startup_timeout")]
        assert min(numbers) > 0


@given(st.text() | JSON.map(json.dumps))
def test_any_text_is_read_or_refused(text):
    with contextlib.suppress(ValueError):
        assert isinstance(saved_models(text), tuple)


TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
COUNT = st.integers(0, 1000)
SECONDS = st.integers(1, 10**6).map(lambda milliseconds: milliseconds / 1000)
SIZES = st.integers(1, 1000).map(float)
MODELS = st.builds(
    ModelEntry,
    name=TEXT,
    version=TEXT,
    is_default=st.booleans(),
    url=TEXT,
    workers=st.tuples(COUNT, st.integers(1000, 2000)),
    runtime=TEXT,
    parallel_level=COUNT,
    handler=st.just("") | TEXT,
    settings=st.fixed_dictionaries(
        {
            "size": st.integers(1, 1000),
            "is_automatic": st.booleans(),
            "delay": st.integers(0, 10**6).map(lambda milliseconds: milliseconds / 1000),
            "response_timeout": SECONDS,
            "startup_timeout": SECONDS,
        },
        optional={
            "policy": st.sampled_from(BATCH_POLICIES),
            "max_latency": SECONDS,
            "num_requests": COUNT,
            "compiled_sizes": st.lists(st.integers(1, 99), max_size=3).map(tuple),
        },
    ),
    batch_costs=st.lists(st.tuples(SIZES, SECONDS, st.integers(1, 99)), max_size=3).map(tuple),
)


@given(st.lists(MODELS, min_size=1, unique_by=lambda model: (model.name, model.version)))
def test_what_was_written_is_read_again(models):
    read = saved_models(snapshot_json("n", 1, models))
    found, expected = (
        {(each.name, each.version): (each, each.is_default) for each in several}
        for several in (read, models)
    )
    assert found == expected
