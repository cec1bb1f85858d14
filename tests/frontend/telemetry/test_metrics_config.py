import json
import logging
import math
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marserve.frontend.telemetry.metrics_config import (
    MetricsConfig,
    MetricsConfigError,
    load_metrics_config,
    parse_metrics_config,
    unfit_name,
)

MODEL = "model_metrics: {}\n"


def load(tmp_path: Path, text: str, auto_detect: bool = False) -> MetricsConfig:
    path = tmp_path / "metrics.yaml"
    path.write_text(text)
    return load_metrics_config(path, auto_detect=auto_detect)


@pytest.fixture
def built_in():
    return load_metrics_config()


# -- the built-in file -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "kind", "unit", "dimensions"),
    [
        (("Requests2XX", "Requests4XX", "Requests5XX"), "counter", "Count", "Level Hostname"),
        (
            ("ts_inference_requests_total",),
            "counter",
            "Count",
            "model_name model_version hostname",
        ),
        (
            ("ts_inference_latency_microseconds", "ts_queue_latency_microseconds"),
            "counter",
            "Microseconds",
            "model_name model_version hostname",
        ),
        (("QueueTime", "WorkerThreadTime"), "gauge", "Milliseconds", "Level Hostname"),
        (("WorkerLoadTime",), "gauge", "Milliseconds", "WorkerName Level Hostname"),
        (
            ("CPUUtilization", "MemoryUtilization", "DiskUtilization"),
            "gauge",
            "Percent",
            "Level Hostname",
        ),
        (("MemoryUsed", "MemoryAvailable"), "gauge", "Megabytes", "Level Hostname"),
        (("DiskUsage", "DiskAvailable"), "gauge", "Gigabytes", "Level Hostname"),
        (
            ("GPUMemoryUtilization", "GPUUtilization"),
            "gauge",
            "Percent",
            "Level DeviceId Hostname",
        ),
        (("GPUMemoryUsed",), "gauge", "Megabytes", "Level DeviceId Hostname"),
        (("HandlerTime", "PredictionTime"), "gauge", "ms", "ModelName Level Hostname"),
    ],
)
def test_it_declares_torchserves_metrics(names, kind, unit, dimensions, built_in):
    both = {**built_in.ts, **built_in.model}
    for name in names:
        declared = both[name]
        found = (declared.kind, declared.unit, " ".join(declared.dimensions))
        assert found == (kind, unit, dimensions)


def test_it_declares_nothing_else_and_nothing_invalid_in_prometheus(built_in):
    assert len(built_in.ts) == 19
    assert len(built_in.model) == 2
    for declared in (*built_in.ts.values(), *built_in.model.values()):
        assert unfit_name(declared) == ""


# -- a file of the operator's ----------------------------------------------------------------------


def test_lists_anchors_and_buckets_are_read(tmp_path):
    config = load(
        tmp_path,
        """
dimensions:
  - &model "ModelName"
ts_metrics:
  histogram:
    - {name: QueueTime, unit: Milliseconds, dimensions: [Level, Hostname], buckets: [1, 10.5]}
model_metrics:
  counter:
    - {name: Tokens, unit: Count, dimensions: [*model, "Level"]}
    - {name: Tokens, unit: Tokens, dimensions: [*model]}
""",
    )
    queue_time = config.ts["QueueTime"]
    assert (queue_time.kind, queue_time.buckets) == ("histogram", (1.0, 10.5))
    assert set(config.ts) == {"QueueTime"}
    tokens = config.model["Tokens"]
    assert (tokens.kind, tokens.unit) == ("counter", "Tokens")  # the last one counts
    assert tokens.dimensions == ("ModelName", "Hostname")


def test_hostname_is_added_once(tmp_path):
    entry = "{name: A, unit: ms, dimensions: [Hostname, Level]}"
    config = load(tmp_path, f"model_metrics: {{gauge: [{entry}]}}")
    assert config.model["A"].dimensions == ("Level", "Hostname")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not yaml"),
        ("- a", "mapping"),
        ("ts_metrics: {}", "model_metrics"),
        ("model_metrics: []", "mapping"),
        ("model_metrics: {summary: []}", "summary"),
        ("model_metrics: {gauge: {}}", "list"),
        ("model_metrics: {gauge: [a]}", "mapping"),
        ("model_metrics: {gauge: [{unit: ms, dimensions: []}]}", "name"),
        ("model_metrics: {gauge: [{name: A, unit: '', dimensions: []}]}", "unit"),
        ("model_metrics: {gauge: [{name: A, dimensions: []}]}", "unit"),
        ("model_metrics: {gauge: [{name: A, unit: ms}]}", "dimensions"),
        ("model_metrics: {gauge: [{name: A, unit: ms, dimensions: [1]}]}", "dimensions"),
        (
            "model_metrics: {histogram: [{name: A, unit: ms, dimensions: [], buckets: [2, 1]}]}",
            "buckets",
        ),
        (
            "model_metrics: {histogram: [{name: A, unit: ms, dimensions: [], buckets: [.inf]}]}",
            "buckets",
        ),
        ("[" * 5_000, "nested more than 64 deep"),
        ("a: [", "not yaml"),
        ("\x00", "not yaml"),
        ("!!timestamp x", "not yaml"),
        ("!!int ''", "not yaml"),
        ("!!bool x", "not yaml"),
        (f"model_metrics: {{? 0x{'f' * 5_000} : []}}", "a key, which is not one of"),
        (
            "model_metrics: {histogram: [{name: A, unit: ms, dimensions: [], "
            f"buckets: [0x{'f' * 300}]}}]}}",
            "buckets",
        ),
    ],
)
def test_a_file_that_cannot_be_used_is_logged_and_replaced_by_the_built_in_one(
    text, reason, tmp_path, built_in, caplog
):
    with pytest.raises(MetricsConfigError, match=reason):
        parse_metrics_config(text.encode())
    config = load(tmp_path, text)
    assert (config.ts, config.model) == (built_in.ts, built_in.model)
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert str(tmp_path / "metrics.yaml") in record.message


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
MEMBERS = st.sampled_from(["name", "unit", "dimensions", "buckets"])
NUMBERS = st.integers() | st.floats() | st.just(16**300)
ENTRY = st.dictionaries(MEMBERS, st.just("A") | st.lists(st.just("B") | NUMBERS) | JSON)
SECTION = st.dictionaries(st.sampled_from(["gauge", "histogram"]) | st.text(), st.lists(ENTRY))
NAMES = st.sampled_from(["ts_metrics", "model_metrics"])


@given(
    st.binary() | st.dictionaries(NAMES, SECTION | JSON).map(lambda each: json.dumps(each).encode())
)
def test_any_text_is_a_metrics_config_or_a_metrics_config_error(text):
    try:
        config = parse_metrics_config(text)
    except MetricsConfigError:
        return
    for declared in [*config.ts.values(), *config.model.values()]:
        assert declared.buckets == tuple(sorted(set(declared.buckets)))
        assert all(map(math.isfinite, declared.buckets))


def test_a_missing_file_is_logged_too(tmp_path, built_in, caplog):
    assert load_metrics_config(tmp_path / "none.yaml").ts == built_in.ts
    assert "none.yaml" in caplog.text


@pytest.mark.timeout(20)
def test_a_pipe_is_logged_too(tmp_path, built_in, caplog):
    os.mkfifo(tmp_path / "pipe.yaml")
    assert load_metrics_config(tmp_path / "pipe.yaml").ts == built_in.ts
    assert "pipe.yaml: is no file" in caplog.text


@pytest.mark.parametrize(
    ("section", "name", "dimensions", "reason"),
    [
        ("ts_metrics", "QueueTime", "[Level]", "Level, Hostname"),
        ("ts_metrics", "QueueTime", "[Level, Model, Hostname]", "Level, Hostname"),
        ("ts_metrics", "two words", "[Level]", "two words"),
        ("ts_metrics", "mine", "['two words']", "two words"),
        ("ts_metrics", "mine", "[a, a]", "twice"),
        ("model_metrics", "HandlerTime", "[ModelName]", "ModelName, Level"),
    ],
)
def test_an_entry_that_does_not_fit_is_logged_and_left_out(
    section, name, dimensions, reason, tmp_path, caplog
):
    other = "{name: other, unit: u, dimensions: []}"
    entry = f"{{name: {name}, unit: u, dimensions: {dimensions}}}"
    text = f"{MODEL if section == 'ts_metrics' else ''}{section}: {{gauge: [{entry}, {other}]}}"
    config = load(tmp_path, text)
    assert set({**config.ts, **config.model}) == {"other"}
    (record,) = caplog.records
    assert name in record.message
    assert reason in record.message


def test_handlers_may_use_names_that_are_invalid_in_prometheus(tmp_path):
    entry = "{name: two words, unit: u, dimensions: [a-b]}"
    assert "two words" in load(tmp_path, f"model_metrics: {{gauge: [{entry}]}}").model


def test_a_name_of_the_servers_is_not_a_handlers(tmp_path, caplog):
    entry = "{gauge: [{name: Both, unit: u, dimensions: []}]}"
    config = load(tmp_path, f"ts_metrics: {entry}\nmodel_metrics: {entry}")
    assert "Both" in config.ts
    assert config.model == {}
    assert "Both" in caplog.text


# -- undeclared metrics --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("auto_detect", "kept"),
    [(True, {"Custom", "HandlerTime"}), (False, set())],
)
def test_undeclared_metrics_are_left_out_unless_they_are_detected(auto_detect, kept, tmp_path):
    config = load(tmp_path, MODEL, auto_detect)
    assert {
        name
        for name in ("Custom", "HandlerTime")
        if name in config.model or config.keeps_undeclared
    } == kept
