"""The text of a catalog: what is read, and what is refused with its reason."""

import contextlib
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from marserve.frontend.catalog.document import (
    MAX_BYTES,
    WORKERS,
    WrongCatalog,
    read_catalog,
)
from marserve.frontend.configuration.model_entry import ModelEntry
from marserve.frontend.configuration.model_schema import SETTINGS


def text(**models: Any) -> bytes:
    return json.dumps({"models": models}).encode()


FULL = text(
    digits={
        "1.0": {"url": "digits.mar", "minWorkers": 1, "batchSize": "auto"},
        "2.0": {
            "url": "s3://bucket/digits.mar",
            "defaultVersion": True,
            "handler": "image_classifier",
            "runtimeType": "python",
            "s3SseKms": True,
            "minWorkers": 0,
            "maxWorkers": 4,
            "batchSize": 8,
            "maxBatchDelay": 50,
            "responseTimeout": 30,
            "batchDim": [1, 0],
            "priorityQueueSizes": {"high": 3, "low": 1},
            "compiledBatchSizes": [1, 4, 8],
            "isolateFailures": False,
        },
    },
    other={"1": {"url": "other.mar", "performanceHint": "latency", "jobQueueSize": 7}},
)


def test_what_is_read():
    catalog = read_catalog(FULL)
    digits, other = catalog["digits"], catalog["other"]
    assert (digits.default, other.default) == ("2.0", "1")
    assert digits.versions["1.0"].workers == (1, 1)
    assert digits.versions["2.0"].workers == (0, 4)
    assert digits.versions["2.0"].settings["delay"] == 0.05
    assert other.versions["1"].workers is None
    # A later change can replace what it sets.
    assert other.versions["1"].settings == {
        "performance_hint": "latency",
        "queue_size": 7,
        "is_queue_bounded": True,
    }


SAMPLES: dict[str, Any] = {
    "performanceHint": "throughput",
    "allowAutoBatching": False,
    "batchable": True,
    "batchPolicy": "greedy",
    "compiledBatchSizes": [2, 4],
    "batchBucketBy": "length",
    "priorityQueueSizes": {"high": 2},
    "batchDim": [0, 1],
    "validateBatching": True,
    "torchWaitPolicy": "active",
    "torchThreads": "auto",
    "openai": "rerank",
    "validateBatchingTolerance": 0.5,
}


ROWS = [row for row in SETTINGS if "models" in row.sources and row.key not in WORKERS]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.key)
def test_every_setting_is_read(row):
    flags = ("isolateFailures", "retryOnWorkerDeath", "dynamicBatchSize")
    value = SAMPLES.get(row.key, False if row.key in flags else 7)
    catalog = read_catalog(text(m={"1": {"url": "m.mar", row.key: value}}))
    assert row.attribute in catalog["m"].versions["1"].settings


def test_no_part_of_a_catalog_is_one():
    whole = FULL.strip()
    for length in range(len(whole)):
        with pytest.raises(WrongCatalog):
            read_catalog(whole[:length])


@pytest.mark.parametrize(
    ("document", "why"),
    [
        (b"", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[]", "the document must be a JSON object"),
        (b"{}", 'must be {"models": {...}}'),
        (b'{"models": {}, "version": 2}', "no other key beside"),
        (b'{"models": null}', "models must be a JSON object"),
        (b'{"models": {"m": 1, "m": 2}}', "'m' appears twice in an object"),
        (b" " * (MAX_BYTES + 1), "longer than"),
    ],
)
def test_what_is_no_catalog_is_refused_with_the_reason(document, why):
    with pytest.raises(WrongCatalog) as caught:
        read_catalog(document)
    assert why in str(caught.value)


@pytest.mark.parametrize(
    ("document", "why"),
    [
        (text(m=1), "m must be a JSON object"),
        (text(m={}), "m has no versions"),
        (text(m={"1": []}), "m 1 must be a JSON object"),
        (text(**{"": {"1": {"url": "m.mar"}}}), "empty name or version"),
        (text(m={"": {"url": "m.mar"}}), "empty name or version"),
        (text(m={"1": {}}), "m 1: url is missing"),
        (text(m={"1": {"url": ""}}), "m 1: url=: it is a text"),
        (text(m={"1": {"url": "m.mar", "batchsize": 4}}), "did you mean batchSize?"),
        (text(m={"1": {"url": "m.mar", "batchSize": 0}}), "m 1: batchSize=0: it is"),
        (text(m={"1": {"url": "m.mar", "batchSize": None}}), "null is not a value"),
        (text(m={"1": {"url": "m.mar", "minWorkers": "2"}}), "minWorkers=2: it is"),
        (text(m={"1": {"url": "m.mar", "maxWorkers": 2}}), "minWorkers is missing"),
        (text(m={"1": {"url": "m.mar", "minWorkers": 2, "maxWorkers": 1}}), "maxWorkers=1"),
        (text(m={"1": {"url": "m.mar", "defaultVersion": 1}}), "defaultVersion=1"),
        (text(m={"1": {"url": "m.mar", "runtimeType": "java"}}), "runtimeType=java"),
        (text(m={"1": {"url": "a"}, "2": {"url": "b"}}), "m has 2 versions; exactly one needs"),
        *((text(m=value), "lone surrogate") for value in ("\ud800", {"\udfff": 1})),
        (text(m={"1": {"url": "m.mar", "newWord": [{"a": "\ud800"}]}}), "lone surrogate"),
        (text(**{"m\ud800": {"1": {"url": "m.mar"}}}), "lone surrogate"),
        (text(**{"m" * 10_000: 1}), "mmm..."),
    ],
)
def test_a_wrong_model_says_why_and_stops_no_other(document, why):
    models = {**json.loads(document)["models"], "other": {"1": {"url": "other.mar"}}}
    catalog = read_catalog(text(**models))
    wrong, other = catalog.values()
    assert why in wrong.wrong
    assert len(wrong.wrong) <= 300
    assert wrong.wrong.isprintable()
    assert (wrong.versions, other.wrong, [*other.versions]) == ({}, "", ["1"])


def test_models_that_are_nested_deeply_can_be_compared():
    with ThreadPoolExecutor(1) as thread:  # which has more recursion left
        for depth in range(900, 1000):
            document = b'{"models": {"m": %s}}' % (b"[" * depth + b"]" * depth)
            with contextlib.suppress(WrongCatalog):
                one, other = (thread.submit(read_catalog, document).result() for _ in range(2))
                assert one == other


def test_entries_are_alike_however_they_are_spelt():
    one = read_catalog(text(m={"1": {"url": "m.mar", "batch_policy": "greedy"}}))
    other = read_catalog(text(m={"1": {"batchPolicy": "greedy", "url": "m.mar"}}))
    assert one == other
    assert one["m"].versions["1"] == ModelEntry("m.mar", settings={"policy": "greedy"})
