import tempfile
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marserve.frontend.archives.contents import read_model_yaml
from marserve.frontend.batching.options import MAX_AUTOMATIC_SIZE, Batching
from marserve.frontend.configuration.config import Config
from marserve.frontend.configuration.model_schema import Autoscaling, TorchRun
from marserve.frontend.configuration.unread_keys import READ_YAML_KEYS, YAML_KEYS, YAML_SECTIONS
from marserve.frontend.errors import ArchiveRefused, BadRequest
from marserve.frontend.settings.model_settings import (
    ModelSettings,
    resolve_settings,
)
from marserve.frontend.settings.parallel import Parallel

KEYS = st.sampled_from(
    [*READ_YAML_KEYS, *chain(*YAML_SECTIONS.values()), "growAfterSec", "shrinkAfterSec", "high"]
)
TIMES = [
    ("response_timeout", "responseTimeout", "default_response_timeout"),
    ("startup_timeout", "startupTimeout", "default_startup_timeout"),
]


def resolved(
    config: Config,
    requested: dict[str, Any] | None = None,
    yaml: dict[str, Any] | None = None,
    numbers: dict[str, int] | None = None,
    **options: Any,
) -> ModelSettings:
    options = {"gpus": 0, "default_workers": 3, **options}
    return resolve_settings(requested or {}, yaml or {}, numbers or {}, config, **options)


def test_a_catalog_goes_before_all_others(config):
    everybody = {"batchSize": 3, "maxBatchDelay": 3, "responseTimeout": 3}
    settings = resolved(
        config,
        {"size": 2, "response_timeout": 2},
        {**everybody, "minWorkers": 3, "maxWorkers": 3},
        everybody,
        catalog={"size": 9, "response_timeout": 9, "min_workers": 0, "max_workers": 9},
    )
    assert (settings.batching.size, settings.response_timeout) == (9, 9)
    assert (settings.min_workers, settings.max_workers) == (0, 9)
    assert settings.batching.delay == 0.003
    for name in ("batch_size", "response_timeout", "workers"):
        assert settings.origins[name] == "catalog"
    with pytest.raises(BadRequest, match=r"^The catalog: "):
        resolved(config, catalog={"policy": "fixed", "max_latency": 0.1})


def test_where_nobody_says_anything_the_defaults_hold(config):
    settings = resolved(config)
    assert (settings.min_workers, settings.max_workers) == (3, 3)
    assert (settings.batching.size, settings.batching.delay) == (1, 0.1)
    assert (settings.response_timeout, settings.startup_timeout) == (120, 120)
    assert (settings.max_retry_timeout, settings.client_timeout) == (300, 0)
    assert settings.batching == Batching(is_queue_bounded=False)
    assert (settings.use_gpu, settings.device_ids) == (True, None)
    assert "batch_size" not in settings.origins
    assert settings.origins["response_timeout"] == "server"


@pytest.mark.parametrize(
    ("requested", "yaml", "models", "size", "delay", "origin"),
    [
        (True, True, True, 2, 0.002, "request"),
        (False, True, True, 3, 0.003, "yaml"),
        (False, False, True, 4, 0.004, "models"),
    ],
)
def test_batching_request_before_yaml_before_models(
    requested, yaml, models, size, delay, origin, config
):
    settings = resolved(
        config,
        {"size": 2, "delay": 0.002} if requested else None,
        {"batchSize": 3, "maxBatchDelay": 3} if yaml else None,
        {"batchSize": 4, "maxBatchDelay": 4} if models else None,
    )
    assert (settings.batching.size, settings.batching.delay) == (size, delay)
    assert (settings.origins["batch_size"], settings.origins["max_batch_delay"]) == (origin, origin)


@pytest.mark.parametrize(("field", "key", "of_server"), TIMES)
@pytest.mark.parametrize(
    ("yaml", "models", "requested", "seconds"),
    [(True, True, True, 5), (False, True, True, 6), (False, False, True, 7), (False,) * 3 + (8,)],
)
def test_timeouts_yaml_before_models_before_request_before_server(
    yaml, models, requested, seconds, field, key, of_server, tmp_path
):
    settings = resolved(
        Config(model_store=tmp_path, **{of_server: 8}),
        {field: 7} if requested else None,
        {key: 5} if yaml else None,
        {key: 6} if models else None,
    )
    assert getattr(settings, field) == seconds


@pytest.mark.parametrize(
    ("yaml", "requested", "numbers", "at_start", "workers"),
    [
        ({"minWorkers": 2, "maxWorkers": 4}, 7, {"minWorkers": 9}, False, (2, 4)),
        ({"minWorkers": 2, "maxWorkers": 4}, 7, {"minWorkers": 9}, True, (2, 4)),
        ({"minWorkers": 2}, 7, {}, False, (7, 7)),
        ({"minWorkers": 4, "maxWorkers": 2}, 7, {}, False, (7, 7)),
        ({}, 0, {}, False, (0, 0)),
        ({}, None, {"minWorkers": 9}, False, (3, 3)),
        ({}, 7, {"minWorkers": 5, "maxWorkers": 6}, True, (5, 6)),
        ({}, None, {"minWorkers": 5}, True, (5, 5)),
        ({}, None, {"minWorkers": 5, "maxWorkers": 1}, True, (5, 5)),
        ({}, None, {}, True, (3, 3)),
    ],
)
def test_workers_come_from_the_yaml_pair_else_from_who_loads_the_model(
    yaml, requested, numbers, at_start, workers, config
):
    options = {} if requested is None else {"default_workers": requested}
    settings = resolved(config, {}, yaml, numbers, at_start=at_start, **options)
    assert (settings.min_workers, settings.max_workers) == workers


@pytest.mark.parametrize(
    ("key", "value", "field", "expected"),
    [
        ("maxRetryTimeoutInSec", 0, "max_retry_timeout", 0),
        ("clientTimeoutInMills", 1500, "client_timeout", 1.5),
        ("deviceType", "CPU", "use_gpu", False),
        ("deviceType", "gpu", "use_gpu", True),
        ("deviceIds", [1, 0], "device_ids", (1, 0)),
        ("deviceIds", [], "device_ids", None),
    ],
)
def test_the_yaml_has_keys_of_its_own(key, value, field, expected, config):
    assert getattr(resolved(config, None, {key: value}, gpus=2), field) == expected


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("batchSize", True),
        ("maxBatchDelay", -1),
        ("deviceType", "tpu"),
        ("deviceType", 1),
        ("deviceIds", [2]),
        ("deviceIds", [-1]),
        ("deviceIds", 0),
        ("deviceIds", [True]),
    ],
)
def test_a_wrong_value_is_reported_and_ignored(key, value, config, caplog):
    assert resolved(config, None, {key: value}, gpus=2) == resolved(config)
    assert f"{key}={value!r} is ignored" in caplog.text


@pytest.mark.parametrize(
    ("yaml", "named"),
    [
        ({}, "sequenceMaxIdleMSec is 1 or more"),
        ({"sequenceMaxIdleMSec": 0}, "sequenceMaxIdleMSec is 1 or more"),
        ({"sequenceMaxIdleMSec": 10, "overlapStages": True}, "overlapStages is false"),
        ({"sequenceMaxIdleMSec": 10, "dynamicBatchSize": True}, "dynamicBatchSize is false"),
        ({"sequenceMaxIdleMSec": 10, "openai": "rerank"}, "openai is not embeddings or rerank"),
        ({"sequenceMaxIdleMSec": 10, "autoscale": True}, "autoscale is false"),
    ],
)
def test_a_stateful_model_is_refused_that_could_not_be_served(yaml, named, config):
    with pytest.raises(ArchiveRefused, match=f"beside sequenceBatching: true {named}"):
        resolved(config, None, {"sequenceBatching": True, **yaml})


def test_what_is_offered_of_openai_is_one_of_some_words(config):
    assert resolved(config).openai == "none"
    for word in ("server", "embeddings", "rerank", "none"):
        assert resolved(config, None, {"openai": word}).openai == word
    with pytest.raises(ArchiveRefused, match="openai=chat: it is one of server, embeddings"):
        resolved(config, None, {"openai": "chat"})


@pytest.mark.parametrize("value", ["on", 2, "true"])
def test_a_wrong_switch_does_not_make_a_model_stateless(value, config):
    with pytest.raises(ArchiveRefused, match=r"sequenceBatching=.*: it is true or false"):
        resolved(config, None, {"sequenceBatching": value})


@pytest.mark.parametrize(
    ("yaml", "sequences", "per_worker", "step"),
    [
        ({"maxNumSequence": 9}, 9, 5, 2),
        ({"maxNumSequence": 3}, 4, 2, 2),
        ({"maxNumSequence": 0}, 4, 2, 2),
        ({"continuousBatching": True}, 4, 2, 4),
    ],
)
def test_there_are_sequences_enough_to_fill_all_batches(yaml, sequences, per_worker, step, config):
    stateful = {"sequenceBatching": True, "sequenceMaxIdleMSec": 10}
    workers = {"minWorkers": 2, "maxWorkers": 2, "batchSize": 2}
    settings = resolved(config, None, {**stateful, **workers, **yaml})
    assert settings.sequence_limits.max_sequences == sequences
    assert settings.slots_per_worker(2) == per_worker
    assert settings.worker_batching.size == step
    assert settings.sequence_limits.max_idle == 0.01


def test_all_models_scale_but_those_with_sequences(config):
    scaling = replace(config, autoscale_workers=True)
    stateful = {"sequenceBatching": True, "sequenceMaxIdleMSec": 10}
    assert resolved(scaling).autoscale is not None
    assert resolved(scaling, None, stateful).autoscale is None


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        (b"batchSize: 2\nhandler: {a: 1}\n", {"batchSize": 2, "handler": {"a": 1}}),
        (b"", {}),
        (b"- a\n- b\n", {}),
        (b"a: [", {}),
        (b"\xff", {}),
        (b"a: !!python/object/apply:os.getcwd []", {}),
        (b"[" * 50, {}),
    ],
)
def test_a_yaml_is_read_or_counts_as_absent(text, parsed, tmp_path):
    path = tmp_path / "model-config.yaml"
    path.write_bytes(text)
    assert read_model_yaml(path) == parsed


def test_a_yaml_that_is_not_there_counts_as_absent(tmp_path, caplog):
    assert read_model_yaml(tmp_path / "gone.yaml") == {}
    assert "Cannot read gone.yaml" in caplog.text


@pytest.mark.parametrize("text", ["[" * 1500, "x" * 2**21, "a: &a [*a]"])
def test_a_yaml_beyond_the_bounds_is_refused(text, tmp_path):
    path = tmp_path / "model-config.yaml"
    path.write_text(text)
    with pytest.raises(ArchiveRefused, match=r"^model-config.yaml (is|has) "):
        read_model_yaml(path)


@pytest.mark.parametrize(
    "text", ["a: 2020-99-99", '!!int ""', "!!timestamp x", "!!float x", "1" * 5000]
)
def test_a_yaml_that_breaks_the_parser_counts_as_absent(text, tmp_path):
    path = tmp_path / "model-config.yaml"
    path.write_text(text)
    assert read_model_yaml(path) == {}


def test_a_number_no_java_int_holds_is_ignored(config):
    yaml = {"maxBatchDelay": 10**400, "responseTimeout": 2**31, "clientTimeoutInMills": 10**400}
    settings = resolved(config, yaml=yaml)
    assert (settings.batching.delay, settings.response_timeout, settings.client_timeout) == (
        0.1,
        120,
        0,
    )
    sentence = "responseTimeout=2147483648 is ignored, it takes at most 2147483647."
    assert f"model-config.yaml: {sentence}" in settings.warnings


@pytest.mark.parametrize(
    ("yaml", "server", "expected"),
    [
        ({}, "false", None),
        ({}, "true", Autoscaling(1, 60)),
        ({"autoscale": False}, "true", None),
        ({"autoscale": True}, "false", Autoscaling(1, 60)),
        ({"autoscale": {"growAfterSec": 0.2}}, "false", Autoscaling(0.2, 60)),
        ({"autoscale": {"growAfterSec": 2, "shrinkAfterSec": 5}}, "false", Autoscaling(2, 5)),
        ({"autoscale": {}}, "false", Autoscaling(1, 60)),
        ({"autoscale": "yes"}, "false", None),
        ({"autoscale": {"growAfterSec": 0}}, "false", None),
        ({"autoscale": {"growAfterSec": True}}, "false", None),
        ({"autoscale": {"shrinkAfter": 5}}, "true", Autoscaling(1, 60)),
    ],
)
def test_autoscaling_is_off_unless_asked_for(yaml, server, expected, config):
    asking = replace(config, autoscale_workers=server == "true")
    assert resolved(asking, yaml=yaml).autoscale == expected


WHOLE = st.integers() | st.integers(-1, 2**31) | st.just(16**300)
ANY_YAML = st.recursive(
    st.none() | st.booleans() | WHOLE | st.floats() | st.text() | st.dates(),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(KEYS | st.text(), inner, max_size=4)
    ),
    max_leaves=10,
)


@given(st.dictionaries(KEYS, ANY_YAML | WHOLE), st.booleans())
def test_any_yaml_gives_numbers_within_bounds_or_is_refused(yaml, at_start):
    config = Config(model_store=Path())
    try:
        settings = resolved(config, yaml=yaml, gpus=2, at_start=at_start)
    except ArchiveRefused:
        return
    assert 1 <= settings.min_workers <= min(1000, settings.max_workers)
    assert 0 <= settings.batching.delay < 2**31
    assert 0 <= settings.client_timeout < 2**31
    assert 0 <= settings.max_retry_timeout < 2**31
    batching = settings.batching
    for number in (
        batching.size,
        batching.queue_size,
        settings.response_timeout,
        settings.startup_timeout,
    ):
        assert 1 <= number < 2**31
    assert set(settings.device_ids or ()) <= {0, 1}
    assert settings.autoscale is None or 0 < settings.autoscale.grow_after < 2**31
    assert settings.parallel is None or 0 < settings.parallel.level < 2**31


@given(st.binary())
def test_any_bytes_are_a_yaml_or_count_as_absent(text):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model-config.yaml")
        path.write_bytes(text)
        assert isinstance(read_model_yaml(path), dict)


@pytest.mark.parametrize("digits", ["0x" + "f" * 5000, "0b" + "1" * 20_000])
def test_a_number_too_long_to_be_written_is_reported_and_ignored(digits, config, tmp_path, caplog):
    path = tmp_path / "model-config.yaml"
    path.write_text(f"batchSize: {digits}\nminWorkers: [{digits}]\n")
    assert resolved(config, yaml=dict(read_model_yaml(path))) == resolved(config)
    assert "batchSize=<a number of 20000 bits> is ignored" in caplog.text
    assert max(map(len, caplog.messages)) < 200


def test_an_archive_does_not_start_more_workers_than_any_machine_runs(config):
    many = {"minWorkers": 1001, "maxWorkers": 2000}
    assert resolved(config, yaml=many) == resolved(config)
    assert resolved(config, yaml=many | {"minWorkers": 1000}).min_workers == 1000


# -- parallel models -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("yaml", "parallel"),
    [
        ({}, None),
        ({"parallelType": "tp"}, None),
        ({"parallelLevel": 2}, None),
        ({"torchrun": {"nproc-per-node": 2}}, None),
        ({"parallelType": "both", "parallelLevel": 2}, None),
        ({"parallelType": "custom", "parallelLevel": 2}, Parallel("custom", 2, TorchRun(1, 2))),
        ({"parallelType": "PP", "parallelLevel": 4}, Parallel("pp", 4, TorchRun(1, 4))),
        (
            {"parallelType": "tp", "torchrun": {"nproc-per-node": 2, "OMP_NUMBER_THREADS": 3}},
            Parallel("tp", 2, TorchRun(1, 2, omp_threads=3)),
        ),
        (
            {"parallelType": "tp", "torchrun": {"nproc-per-node": 2}, "parallelLevel": 4},
            Parallel("tp", 4, TorchRun(1, 2)),
        ),
        (
            {"parallelType": "tp", "parallelLevel": 4, "torchrun": {"nproc-per-node": 2}},
            Parallel("tp", 2, TorchRun(1, 2)),
        ),
        (
            {"parallelType": "pptp", "torchrun": {"nnodes": "2", "rdzv-endpoint": "h:1"}},
            Parallel("pptp", 1, TorchRun(1, 1, "c10d", "h:1")),
        ),
    ],
)
def test_a_parallel_type_and_a_level_belong_together(yaml, parallel, config):
    assert resolved(config, yaml=yaml).parallel == parallel


def test_no_parallel_type_is_no_mistake(config, caplog):
    assert resolved(config, yaml={"parallelType": "NONE"}).parallel is None
    assert caplog.text == ""


@pytest.mark.parametrize("key", ["continuousBatching", "autoscale"])
def test_what_has_no_effect_beside_asynchronous_handlers_is_reported(key, config, caplog):
    resolved(config, None, {"asyncCommunication": True})
    assert caplog.text == ""
    resolved(config, None, {"asyncCommunication": True, key: True})
    assert f"{key} has no effect beside asyncCommunication" in caplog.text


@pytest.mark.parametrize(
    ("yaml", "requested", "kind", "place"),
    [
        ({"validateBatching": True}, {}, ArchiveRefused, "model-config.yaml: "),
        ({}, {"validation": "refuse"}, BadRequest, ""),
    ],
)
def test_a_validation_that_is_not_possible_is_blamed_on_its_source(
    config, yaml, requested, kind, place
):
    why = "validateBatching has no meaning beside continuousBatching"
    with pytest.raises(kind, match=f"^{place}{why}"):
        resolved(config, requested, {"continuousBatching": True, **yaml})


# -- keys that are not read ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("BatchSize", "did you mean batchSize?"),
        ("batch_size", "did you mean batchSize?"),
        ("max-batch-delay", "did you mean maxBatchDelay?"),
        ("minworker", "did you mean minWorkers?"),
        ("responseTimout", "did you mean responseTimeout?"),
        ("workers", "minWorkers and maxWorkers say how many workers there are."),
        ("default_response_timeout", "it counts in config.properties, for all models."),
    ],
)
def test_a_key_of_the_yaml_that_is_nearly_right_was_passed_over_in_silence(
    config, caplog, key, hint
):
    resolved(config, yaml={key: 4})
    (record,) = caplog.records
    sentence = f"model-config.yaml: {key} is no key that the server reads here; {hint}"
    assert (record.levelname, record.message) == ("WARNING", sentence)


def test_keys_of_handlers_are_nobodys_business(config, caplog):
    yaml = {
        "handler": {"batch_size": 4, "model_path": "m"},
        "pt2": {"compile": {"enable": True}},
        "micro_batching": {"mb_size": 4},
        "max_length": 50,
        "device": "cuda:0",
        "workers_of_mine": 1,
        "b" * 5000: 1,
        7: 8,
        None: 1,
        **{f"layer{number}": number for number in range(2000)},
    }
    resolved(config, yaml=yaml)
    assert caplog.records == []


FOUND = {"size": MAX_AUTOMATIC_SIZE, "is_automatic": True}


@pytest.mark.parametrize(
    ("yaml", "expected"),
    [
        (
            {"batching": {"enabled": True, "max_batch_size": 8, "max_latency_ms": 50}},
            {"policy": "adaptive", "size": 8, "max_latency": 0.05},
        ),
        ({"batching": {"max_batch_size": 8}}, {"policy": "adaptive", "size": 8}),
        ({"batching": {"enabled": True}}, {"policy": "adaptive", **FOUND}),
        (
            {"batching": {"enabled": False, "max_batch_size": 8, "max_latency_ms": 50}},
            {"policy": "fixed", "size": 1, "max_latency": 0.0},
        ),
        (
            {"batching": {"max_latency_ms": 50}, "maxLatencyMs": 70},
            {"policy": "adaptive", "max_latency": 0.07},
        ),
        ({"batching": {"max_batch_size": 8}, "batchPolicy": "greedy"}, {"policy": "greedy"}),
    ],
)
def test_bentomls_batching(config, yaml, expected):
    settings = resolved(config, yaml=yaml)
    assert {name: settings.values[name] for name in expected} == expected
    assert settings.warnings == ()


@pytest.mark.parametrize(
    ("yaml", "words"),
    [
        ({"batching": {"max_batch_size": 0}}, "maxBatchSize=0: it is a whole number, 1 or more"),
        ({"batching": {"enabled": "maybe"}}, "batchable=maybe: it is true or false."),
        ({"batching": {"enabled": False}, "batchSize": 4}, "batchable=false is a batch size of 1"),
    ],
)
def test_a_wrong_batching_of_bentoml_refuses_the_archive(config, yaml, words):
    with pytest.raises(ArchiveRefused, match=f"^model-config.yaml: {words}"):
        resolved(config, yaml=yaml)


@pytest.mark.parametrize(
    ("yaml", "sentence"),
    [
        (
            {"batching": {"enabled": True, "strategy": "intelligent_wait"}},
            "batching: strategy is no key that the server reads here; its keys are enabled, "
            "max_batch_size, max_latency_ms.",
        ),
        (
            {"runners": {"batching": {"enabled": True}}},
            "runners is no key that the server reads here; here they are batchSize, maxLatencyMs, "
            "minWorkers and maxWorkers.",
        ),
        (
            {"signatures": {"predict": {"batchable": True}}},
            "signatures is no key that the server reads here; here it is batchable, and batchDim "
            "in model-config.yaml.",
        ),
        (
            {"device": "BATCH:GPU(4)"},
            "device: here BATCH:GPU(4) is batch_size=4 with batch_policy=fixed_or_single, and "
            "BATCH:GPU is batch_size=auto.",
        ),
        (
            {"AUTO_BATCH_TIMEOUT": 0},
            "AUTO_BATCH_TIMEOUT is no key that the server reads here; here it is max_batch_delay, "
            "in milliseconds; 0, no batches, is batch_size=1.",
        ),
        (
            {"PERFORMANCE_HINT": "LATENCY"},
            "PERFORMANCE_HINT is no key that the server reads here; did you mean performanceHint?",
        ),
    ],
)
def test_keys_of_other_servers_are_reported_with_ours(config, yaml, sentence):
    assert resolved(config, yaml=yaml).warnings == (f"model-config.yaml: {sentence}",)


UNREAD = "is no key that the server reads here;"
OPTIONS = (
    "precision, cast, channels_last, fold_batch_norm, cuda_graphs, device_stages, check_accuracy"
)


@pytest.mark.parametrize(
    ("yaml", "sentences"),
    [
        ({"optimisation": {}}, [f"optimisation {UNREAD} did you mean optimization?"]),
        ({"optimizations": {}}, [f"optimizations {UNREAD} did you mean optimization?"]),
        ({"precision": "bf16"}, [f"precision {UNREAD} it counts in the section optimization."]),
        ({"nnodes": 2}, [f"nnodes {UNREAD} it counts in the section torchrun."]),
        (
            {"deviceStages": ["cpu", "cpu"]},
            [f"deviceStages {UNREAD} did you mean device_stages in the section optimization?"],
        ),
        ({"batch_dimension": 1}, [f"batch_dimension {UNREAD} did you mean batchDim?"]),
        ({"max_num_seq": 1}, [f"max_num_seq {UNREAD} did you mean maxNumSequence?"]),
        (
            {"optimization": {"batchSize": 4, "precison": "bf16", "level": 3}},
            [
                f"optimization: batchSize {UNREAD} it counts at the top level.",
                f"optimization: precison {UNREAD} did you mean precision?",
                f"optimization: level {UNREAD} its keys are {OPTIONS}.",
            ],
        ),
        (
            {"optimization": {"check_accuracy": {"sample": ["a"]}}},
            [f"optimization.check_accuracy: sample {UNREAD} did you mean samples?"],
        ),
        (
            {"batching": {7: 8}},
            [f"batching: 7 {UNREAD} its keys are enabled, max_batch_size, max_latency_ms."],
        ),
        (
            {"torchrun": {"nproc_per_node": 2, "precision": "bf16", "nnodes": 1}},
            [
                f"torchrun: nproc_per_node {UNREAD} did you mean nproc-per-node?",
                f"torchrun: precision {UNREAD} it counts in the section optimization.",
            ],
        ),
    ],
)
def test_a_key_near_one_of_ours_or_in_the_wrong_place_was_ignored_in_silence(
    config, yaml, sentences
):
    warnings = resolved(config, yaml={**yaml, "parallelType": "pp", "parallelLevel": 2}).warnings
    assert warnings == tuple(f"model-config.yaml: {sentence}" for sentence in sentences)


@pytest.mark.parametrize(
    ("value", "meant"),
    [
        (True, "; did you mean batchable: true?"),
        (False, "; did you mean batchable: false?"),
        ("adaptive", "; did you mean batchPolicy: adaptive?"),
        ("often", "."),
        ([1, 2], "."),
    ],
)
def test_a_section_of_batching_that_is_no_map_was_ignored_in_silence(config, value, meant):
    settings = resolved(config, yaml={"batching": value})
    assert settings.batching.policy == "fixed"
    assert settings.warnings == (
        f"model-config.yaml: batching={value!r} is ignored, it takes a map of enabled, "
        f"max_batch_size, max_latency_ms{meant}",
    )


def test_every_key_that_is_read_is_a_known_one(config):
    asked = set()

    class Watched(dict[str, Any]):
        def get(self, key, default=None):
            asked.add(key)
            return super().get(key, default)

    resolved(config, yaml=Watched(own=1))
    assert asked <= {*READ_YAML_KEYS}
    assert asked >= {*YAML_KEYS}
