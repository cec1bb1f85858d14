"""TorchServe's modules about metrics that our workers do not use."""

import io
import logging
import os
import re
import subprocess
import sys
import types

import pytest
from ts.metrics import metric_cache_errors, process_memory_metric, system_metrics
from ts.metrics.metric_cache_abstract import MetricCacheAbstract
from ts.metrics.metric_cache_yaml_impl import MetricsCacheYamlImpl
from ts.metrics.metric_type_enum import MetricTypes
from ts.metrics.unit import Units

YAML = """
dimensions: [&m "ModelName", &l "Level"]
model_metrics:
  counter:
    - {name: Cats, unit: count, dimensions: [*m, *l]}
  gauge:
    - {name: Heat, unit: degrees, dimensions: [Room]}
  histogram:
"""


@pytest.fixture
def cache(tmp_path):
    def make(text=YAML):
        path = tmp_path / "metrics.yaml"
        path.write_text(text)
        return MetricsCacheYamlImpl(str(path))

    return make


def test_a_cache_has_what_the_file_declares_and_logs_it(cache, caplog):
    caplog.set_level(logging.INFO)
    metrics = cache()
    metrics.model_name = "kitten"
    assert isinstance(metrics, MetricCacheAbstract)
    metrics.initialize_cache()
    assert metrics.cache_keys() == ["counter:Cats", "gauge:Heat"]
    metrics.get_metric("Heat", MetricTypes.GAUGE).add_or_update(21, ["kitchen"])
    metrics.set_request_ids({0: "a"})
    metrics.add_counter("Cats", 2)
    heat, cats = (item.getMessage() for item in caplog.records)
    assert re.fullmatch(
        r"\[METRICS\]Heat\.degrees:21\|#Room:kitchen\|#type:GAUGE\|#hostname:[^,]+,\d+", heat
    )
    assert re.fullmatch(
        r"\[METRICS\]Cats\.Count:2\|#ModelName:kitten,Level:Model\|#type:COUNTER\|#hostname:.+,\d+,a",
        cats,
    )
    assert metrics.store == []


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("dimensions: []", "MetricsCacheKeyError"),
        ("- a list", "MetricsCacheKeyError"),
        ("model_metrics:", "MetricsCacheValueError"),
        ("model_metrics: {cats: []}", "MetricsCacheKeyError"),
        ("model_metrics: {gauge: [{name: a, unit: b}]}", "MetricsCacheKeyError"),
        ("model_metrics: {gauge: [{name: a, unit: 1, dimensions: []}]}", "MetricsCacheTypeError"),
        ("model_metrics: {gauge: [{name: a, unit: b, dimensions: c}]}", "MetricsCacheTypeError"),
        ("a: [", "MetricsCachePyYamlError"),
    ],
)
def test_invalid_files_are_refused(cache, text, error):
    with pytest.raises(getattr(metric_cache_errors, error)):
        cache(text).initialize_cache()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model_metrics: {cats: []}", "Invalid metric type: 'cats' is not a valid MetricTypes"),
        (
            "model_metrics: {gauge: [{name: a, unit: b}]}",
            "Key not found in cache spec: 'dimensions'",
        ),
    ],
)
def test_the_message_names_the_mistake(cache, text, message):
    with pytest.raises(metric_cache_errors.MetricsCacheKeyError, match=message):
        cache(text).initialize_cache()


def test_no_file(tmp_path):
    with pytest.raises(metric_cache_errors.MetricsCacheIOError, match=r"gone\.yaml"):
        MetricsCacheYamlImpl(str(tmp_path / "gone.yaml"))
    with pytest.raises(metric_cache_errors.MetricsCacheTypeError):
        MetricsCacheYamlImpl(None)


def test_a_missing_metric(cache):
    with pytest.raises(metric_cache_errors.MetricsCacheKeyError):
        cache().get_metric("Dogs")
    with pytest.raises(metric_cache_errors.MetricsCacheTypeError):
        cache().get_metric("Dogs", "gauge")
    with pytest.raises(metric_cache_errors.MetricsCacheTypeError):
        cache().get_metric(1)


def test_units():
    assert (Units().units["ms"], Units().units[None]) == ("Milliseconds", "unit")


def test_each_call_measures_the_host_once(caplog):
    caplog.set_level(logging.INFO)
    for _ in range(2):
        system_metrics.collect_all(system_metrics, 0)
    names = [item.name for item in system_metrics.system_metrics]
    assert sorted(names) == [
        "CPUUtilization",
        "DiskAvailable",
        "DiskUsage",
        "DiskUtilization",
        "MemoryAvailable",
        "MemoryUsed",
        "MemoryUtilization",
    ]
    assert "MemoryUtilization.Percent:" in caplog.text


def test_a_custom_module_is_measured():
    mine = types.ModuleType("mine")
    called = []
    mine.cats = lambda: called.append("cats")
    mine.collect_gpu_metrics = lambda gpus: called.append(gpus)
    mine._helper = lambda: called.append("never")
    system_metrics.collect_all(mine, 3)
    assert called == ["cats", 3]


def test_the_memory_of_processes(caplog):
    caplog.set_level(logging.INFO)
    process_memory_metric.check_process_mem_usage(io.StringIO(f"{os.getpid()},,nobody\n"))
    lines = [item.getMessage() for item in caplog.records if item.levelno == logging.INFO]
    assert int(lines[0].removeprefix(f"{os.getpid()}:")) > 1_000_000
    assert lines[1] == "nobody:0"


def test_the_program_that_measures_the_host():
    command = [sys.executable, "-m", "ts.metrics.metric_collector", "--gpu", "0"]
    ended = subprocess.run(
        command, input=f"{os.getpid()}\n", capture_output=True, text=True, check=True
    )
    assert "CPUUtilization.Percent:" in ended.stdout
    assert f"\n{os.getpid()}:" in ended.stdout
