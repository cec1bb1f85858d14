import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from served_models import saved_entry

from marserve.frontend.batching.jobs import Priority
from marserve.frontend.batching.options import MAX_AUTOMATIC_SIZE, Batching
from marserve.frontend.configuration.model_schema import SETTINGS
from marserve.frontend.configuration.saved_models import SAVED
from marserve.frontend.errors import ArchiveRefused, BadRequest
from marserve.frontend.settings.batching_settings import sizes_to_try
from marserve.frontend.settings.model_settings import (
    ModelSettings,
    models_settings,
    resolve,
    server_settings,
)
from marserve.frontend.settings.model_yaml import yaml_settings

Fields = dict[str, Any]
AUTO = {"is_automatic": True}
PLAIN = ModelSettings()


def adaptive(**settings: Any) -> Batching:
    """By length where that pays, unless somebody says otherwise."""
    return Batching(policy="adaptive", bucket_by="auto", **settings)


def size(count: int) -> Fields:
    return {"size": count, "is_automatic": False}


def resolved(
    request: Fields | None = None, yaml: Fields | None = None, models: Fields | None = None
) -> Batching:
    layers = {"models": models or {}, "yaml": yaml or {}, "request": request or {}}
    return settings_of(layers).batching


def settings_of(layers: dict[str, Fields], start: ModelSettings = PLAIN) -> ModelSettings:
    """The settings of layers by their sources, the weakest first."""
    return resolve(list(layers.items()), start)


# -- who decides -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attribute", "name", "values"),
    [
        ("size", "batch_size", (2, 3, 4)),
        ("delay", "max_batch_delay", (0.2, 0.3, 0.4)),
        ("policy", "batch_policy", ("greedy", "adaptive", "fixed_or_single")),
        ("num_requests", "num_requests", (2, 3, 4)),
        ("compiled_sizes", "compiled_batch_sizes", ((1, 2), (1, 3), (1, 4))),
        ("queue_size", "job_queue_size", (2, 3, 4)),
    ],
)
@pytest.mark.parametrize("first", [0, 1, 2])
def test_request_before_yaml_before_models(attribute, name, values, first):
    origins = ("request", "yaml", "models")
    asked = {origin: {} for origin in reversed(origins)}
    for origin, value in list(zip(origins, values, strict=True))[first:]:
        asked[origin] = {attribute: value}
    settings = settings_of(asked)
    assert getattr(settings.batching, attribute) == values[first]
    assert settings.origins[name] == origins[first]


def test_where_nobody_says_anything_it_is_torchserves(config):
    settings = settings_of({"server": server_settings(config, PLAIN)})
    assert settings.batching == Batching(is_queue_bounded=False)
    assert {*settings.origins.values()} == {"server"}
    assert {"batch_policy", "job_queue_size"} < settings.origins.keys()
    assert not {"batch_size", "max_batch_delay"} & settings.origins.keys()


def test_the_bound_of_the_queue_is_somebodys_where_it_was_written_down(config):
    chosen = replace(config, job_queue_size=100, texts={"job_queue_size": "100"})
    assert settings_of({"server": server_settings(chosen, PLAIN)}).batching.is_queue_bounded
    layers = {
        "server": server_settings(config, PLAIN),
        "yaml": yaml_settings({"jobQueueSize": 100}),
    }
    assert settings_of(layers).batching.is_queue_bounded


# -- what follows ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, Batching()),
        ({"policy": "greedy"}, Batching(policy="greedy")),
        ({"policy": "fixed_or_single"}, Batching(policy="fixed_or_single")),
        (
            {"policy": "adaptive"},
            adaptive(size=MAX_AUTOMATIC_SIZE, is_automatic=True),
        ),
        (
            {"max_latency": 0.05},
            adaptive(size=MAX_AUTOMATIC_SIZE, is_automatic=True, max_latency=0.05),
        ),
        ({"max_latency": 0.05, **size(1)}, adaptive(size=1, max_latency=0.05)),
        ({"max_latency": 0.0}, Batching()),
        (AUTO, Batching(policy="fixed", size=MAX_AUTOMATIC_SIZE, is_automatic=True)),
        ({"compiled_sizes": (1, 4)}, Batching(size=4, compiled_sizes=(1, 4))),
        ({"compiled_sizes": (1, 4), **size(1)}, Batching(size=1, compiled_sizes=(1, 4))),
        (
            {"compiled_sizes": (1, 256), "policy": "adaptive"},
            adaptive(size=256, is_automatic=True, compiled_sizes=(1, 256)),
        ),
    ],
)
def test_what_nobody_says_follows_from_the_rest(asked, expected):
    assert resolved(asked) == expected
    assert resolved(yaml=asked) == expected


def test_a_goal_beats_a_weaker_policy_and_a_policy_a_weaker_goal():
    goal, greedy = {"max_latency": 0.05}, {"policy": "greedy"}
    assert resolved(goal, greedy).policy == "adaptive"
    assert resolved(greedy, goal) == Batching(policy="greedy")
    origins = settings_of({"yaml": goal, "request": greedy}).origins
    assert origins["max_latency_ms"] == origins["batch_policy"] == "request"


# -- contradictions --------------------------------------------------------------------------------

TWO_MINDS = {"policy": "greedy", "max_latency": 0.05}


@pytest.mark.parametrize(
    ("sources", "error", "words"),
    [
        ({"request": TWO_MINDS}, BadRequest, "max_latency_ms=50: only batch_policy=adaptive"),
        ({"yaml": TWO_MINDS}, ArchiveRefused, "model-config.yaml: max_latency_ms=50: only"),
        ({"models": TWO_MINDS}, BadRequest, "models= in the configuration: max_latency_ms=50"),
        ({"request": {"delay": 0.0}, "yaml": TWO_MINDS}, ArchiveRefused, "model-config.yaml: max"),
        (
            {"request": size(8), "yaml": {"compiled_sizes": (1, 4)}},
            BadRequest,
            "batch_size=8: the largest of compiled_batch_sizes=1,4",
        ),
        (
            {"yaml": size(8), "models": {"compiled_sizes": (1, 4)}},
            ArchiveRefused,
            "batch_size=8: the largest",
        ),
        ({"request": {"compiled_sizes": (4, 1)}}, BadRequest, "compiled_batch_sizes=4,1: each"),
    ],
)
def test_a_contradiction_is_reported_to_whose_it_is(sources, error, words):
    layers = {origin: sources.get(origin, {}) for origin in ("models", "yaml", "request")}
    with pytest.raises(error, match="^" + re.escape(words) if "models" in words else words):
        settings_of(layers)


def test_what_the_request_mends_is_no_contradiction():
    mended = resolved({"policy": "adaptive"}, TWO_MINDS)
    assert (mended.policy, mended.max_latency) == ("adaptive", 0.05)


@pytest.mark.parametrize(
    ("attribute", "key"),
    [("asynchronous", "asyncCommunication"), ("continuous_batching", "continuousBatching")],
)
@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"policy": "greedy"}, "batch_policy=greedy"),
        ({"max_latency": 0.05}, "max_latency_ms=50"),
        ({"performance_hint": "latency"}, r"batch_policy=adaptive \(by performance_hint\)"),
        (AUTO, "batch_size=auto"),
        ({"compiled_sizes": (1, 4)}, "compiled_batch_sizes=1,4"),
        ({"splits_lists": True}, "dynamicBatchSize=true"),
    ],
)
def test_where_there_are_no_batches_to_form_there_is_only_fixed(attribute, key, asked, words):
    start = replace(PLAIN, **{attribute: True})
    with pytest.raises(BadRequest, match=f"^{words} has no meaning beside {key}"):
        settings_of({"request": asked}, start)
    with pytest.raises(ArchiveRefused, match=f"{words} has no meaning beside {key}"):
        settings_of({"yaml": asked}, start)
    settings = settings_of({"request": size(4)}, start)
    with pytest.raises(ValueError, match=f"{words} has no meaning"):
        settings.changed(asked)


def test_the_servers_policy_is_not_for_them(config):
    chosen = replace(config, default_batch_policy="adaptive")
    for start, policy in (
        (ModelSettings(continuous_batching=True), "fixed"),
        (PLAIN, "adaptive"),
    ):
        layers = {"server": server_settings(chosen, start)}
        assert settings_of(layers, start).batching.policy == policy


# -- yaml and models= ------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["batchSize", "maxBatchDelay", "jobQueueSize"])
def test_wrong_values_of_torchserves_keys_are_reported_and_ignored(key, caplog):
    assert yaml_settings({key: "8", "numRequests": 2}) == {"num_requests": 2}
    assert f"model-config.yaml: {key}='8' is ignored, it takes a whole number" in caplog.text


@pytest.mark.parametrize(
    "key", ["maxBatchSize", "batchPolicy", "maxLatencyMs", "compiledBatchSizes", "isolateFailures"]
)
def test_wrong_values_of_new_keys_refuse_the_archive(key):
    with pytest.raises(ArchiveRefused, match=f"^model-config.yaml: {key}=8s: it is "):
        yaml_settings({key: "8s"})


def test_seats_are_those_of_priorities():
    asked = {"priorityQueueSizes": {"high": 2, "low": 3}}
    assert yaml_settings(asked)["capacities"] == {Priority.HIGH: 2, Priority.LOW: 3}
    assert models_settings(asked)["capacities"] == {Priority.HIGH: 2, Priority.LOW: 3}


def test_models_with_two_minds_about_a_size():
    with pytest.raises(BadRequest, match="models= in the configuration: batchSize and"):
        models_settings({"batchSize": 2, "maxBatchSize": 3, "minWorkers": 1})


# -- live changes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "changes", "expected"),
    [
        ({}, size(8), Batching(size=8)),
        (size(8), {"delay": 0.0}, Batching(size=8, delay=0.0)),
        (size(8), AUTO, Batching(size=MAX_AUTOMATIC_SIZE, is_automatic=True)),
        (AUTO, size(8), Batching(size=8)),
        # Nobody has said a size, so that it follows from the rest, now as before.
        (
            {},
            {"max_latency": 0.05},
            adaptive(size=128, is_automatic=True, max_latency=0.05),
        ),
        ({"max_latency": 0.05}, {"policy": "greedy"}, Batching(policy="greedy", size=1)),
        (
            {"compiled_sizes": (1, 4)},
            {"compiled_sizes": (1, 2)},
            Batching(size=2, compiled_sizes=(1, 2)),
        ),
        ({"compiled_sizes": (1, 4)}, {"compiled_sizes": ()}, Batching()),
        # Somebody has.
        (size(8), {"max_latency": 0.05}, adaptive(size=8, max_latency=0.05)),
        (
            {"max_latency": 0.05, **size(8)},
            {"max_latency": 0.0},
            adaptive(size=8),
        ),
        ({"max_latency": 0.05, **size(8)}, {"policy": "fixed"}, Batching(size=8)),
    ],
)
def test_a_change_is_one_more_layer(asked, changes, expected):
    assert settings_of({"yaml": asked}).changed(changes).batching == expected


def test_a_change_says_that_it_decided():
    settings = settings_of({"yaml": {**size(8), "num_requests": 2}})
    origins = settings.changed({"num_requests": 3}).origins
    assert (origins["num_requests"], origins["batch_size"]) == ("request", "yaml")


@pytest.mark.parametrize("changes", [{"compiled_sizes": (1, 4)}, TWO_MINDS])
def test_a_change_that_contradicts_is_refused(changes):
    settings = settings_of({"yaml": size(8)})
    with pytest.raises(ValueError, match=r"batch_size=8|max_latency_ms=50"):
        settings.changed(changes)


# -- settings of other servers ---------------------------------------------------------------------

LATENCY, THROUGHPUT, NO_HINT = (
    {"performance_hint": value} for value in ("latency", "throughput", "none")
)
ALONE, TOGETHER = {"batchable": False}, {"batchable": True}
FORBIDDEN = {"allow_auto_batching": False}
FOUND = {"size": MAX_AUTOMATIC_SIZE, "is_automatic": True}


def after(asked: Fields, *changes: Fields) -> ModelSettings:
    settings = settings_of({"server": {"policy": "fixed"}, "yaml": asked})
    for each in changes:
        settings = settings.changed(each)
    return settings


@pytest.mark.parametrize("asked", [{}, {"delay": 0.02}, LATENCY, FORBIDDEN])
@pytest.mark.parametrize("last", [LATENCY, THROUGHPUT, NO_HINT, ALONE, TOGETHER, FORBIDDEN])
@pytest.mark.parametrize("before", [LATENCY, THROUGHPUT, ALONE, FORBIDDEN])
def test_the_last_hint_means_what_it_means_at_a_registration(before, last, asked):
    registered = settings_of({"server": {"policy": "fixed"}, "yaml": asked, "request": last})
    assert after(asked, before, last).batching == registered.batching


@pytest.mark.parametrize(
    ("changes", "policy", "expected"),
    [
        ([LATENCY, THROUGHPUT], "adaptive", {"delay": 0.1, **FOUND}),
        ([FORBIDDEN, TOGETHER], "adaptive", {"delay": 0.1, **FOUND}),
        ([LATENCY, NO_HINT], "fixed", {"delay": 0.1, **size(1)}),
        # What was chosen after a hint, or is not set by the next one, stays.
        ([LATENCY, {"delay": 0.02}], "adaptive", {"delay": 0.02}),
        ([LATENCY, {"delay": 0.02}, THROUGHPUT], "adaptive", {"delay": 0.02, **FOUND}),
        ([size(8), LATENCY], "adaptive", {"delay": 0.0, **size(8)}),
        ([LATENCY, {"policy": "greedy"}, FORBIDDEN], "greedy", {"delay": 0.1, **size(1)}),
        # The last change counts, hint or not.
        ([ALONE, size(8)], "fixed", size(8)),
        ([size(8), ALONE], "fixed", size(1)),
        ([size(8), THROUGHPUT, ALONE, TOGETHER], "adaptive", FOUND),
        ([{"delay": 0.02}, {**LATENCY, **size(4)}, THROUGHPUT], "adaptive", {"delay": 0.1}),
        ([{**LATENCY, "delay": 0.02}], "adaptive", {"delay": 0.02}),
        ([LATENCY, {"max_latency": 0.05}, NO_HINT], "adaptive", {"max_latency": 0.05}),
    ],
)
def test_hints_and_other_settings_in_turn(changes, policy, expected):
    batching = after({}, *changes).batching
    assert batching.policy == policy
    assert {name: vars(batching)[name] for name in expected} == expected


def test_a_hint_says_what_it_decided():
    origins = after({"delay": 0.02}, LATENCY).origins
    assert origins["batch_policy"] == origins["max_batch_delay"] == "performance_hint"
    assert origins["performance_hint"] == "request"
    assert after({"delay": 0.02}, LATENCY, NO_HINT).origins["max_batch_delay"] == "yaml"


def test_the_hint_of_a_stronger_source_replaces_that_of_a_weaker_one():
    assert resolved(THROUGHPUT, LATENCY).delay == 0.1
    assert resolved({"delay": 0.3}, LATENCY, ALONE).policy == "adaptive"
    assert resolved(TOGETHER, ALONE).is_automatic


def test_changes_do_not_add_up():
    settings = after({"delay": 0.02}, LATENCY)
    for _ in range(3):
        settings = settings.changed(THROUGHPUT).changed(size(3)).changed(LATENCY)
    assert len(settings.layers) == 3


@pytest.mark.parametrize("asked", [{}, {"delay": 0.02}, LATENCY])
def test_a_changed_entry_of_a_catalog_counts_as_a_new_one_would(asked):
    below = {"server": {"policy": "fixed"}, "yaml": asked}
    settings = settings_of({**below, "request": size(3), "catalog": {"queue_size": 3}})
    for entry in (LATENCY, {**LATENCY, "delay": 0.05}, {"queue_size": 7}, {}, THROUGHPUT):
        settings = settings.with_catalog(entry)
        assert settings.batching == settings_of({**below, "catalog": entry}).batching


# -- settings that requests no longer set ----------------------------------------------------------


def unset(*names: str) -> Fields:
    return dict.fromkeys(names)


SIZE_UNSET = unset("size", "is_automatic")


@pytest.mark.parametrize(
    ("asked", "changes"),
    [
        ({}, [size(8), SIZE_UNSET]),
        (size(3), [size(8), SIZE_UNSET]),
        ({}, [{"max_latency": 0.05}, unset("max_latency", "policy")]),
        ({"max_latency": 0.05}, [{"policy": "greedy"}, unset("max_latency", "policy")]),
        ({"max_latency": 0.05}, [{"max_latency": 0.2}, unset("policy", "max_latency")]),
        ({"delay": 0.02}, [THROUGHPUT, unset("performance_hint")]),
        (LATENCY, [THROUGHPUT, unset("performance_hint")]),
        ({"num_requests": 2}, [{"num_requests": 7, **size(4)}, unset("num_requests", *SIZE_UNSET)]),
    ],
)
def test_what_is_no_longer_set_is_as_if_it_never_had_been(asked, changes):
    before, settings = after(asked), after(asked, *changes)
    assert (settings.batching, settings.origins) == (before.batching, before.origins)
    for later in ({"max_latency": 0.1}, {"policy": "adaptive"}, THROUGHPUT):
        assert settings.changed(later).batching == before.changed(later).batching


def test_other_settings_stay_when_one_is_no_longer_set():
    settings = after({}, {"max_latency": 0.05, **size(8), **FORBIDDEN, **LATENCY})
    assert settings.changed(SIZE_UNSET).batching.max_latency == 0.05
    kept = settings.changed(unset("performance_hint")).batching
    assert (kept.allow_auto_batching, kept.size, kept.policy) == (False, 8, "adaptive")
    policy_unset = settings.changed(unset("policy")).batching
    assert (policy_unset.max_latency, policy_unset.policy) == (0.05, "adaptive")


# -- snapshots -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "changes"),
    [
        ({}, {}),
        ({}, size(8)),
        (size(8), {"delay": 0.0, "queue_size": 3}),
        ({}, {"max_latency": 0.05}),
        (size(8), {"max_latency": 0.05}),
        ({"max_latency": 0.05}, {"policy": "greedy"}),
        ({"max_latency": 0.05}, {"policy": "fixed", **size(3)}),
        ({"policy": "greedy"}, {"policy": "fixed"}),
        (size(8), {"compiled_sizes": (1, 4), **size(4)}),
        ({"compiled_sizes": (1, 4)}, {"compiled_sizes": (), **size(16)}),
        (AUTO, size(8)),
        (size(8), AUTO),
        ({}, LATENCY),
        (LATENCY, THROUGHPUT),
        (LATENCY, NO_HINT),
        (LATENCY, {**LATENCY, **FORBIDDEN}),
        (ALONE, TOGETHER),
        ({**LATENCY, "delay": 0.02}, {"num_requests": 3}),
        ({}, {**size(1), "policy": "fixed", "bucket_by": "none", "queue_size": 100}),
        (size(8), {**size(8), "delay": 0.1}),
        ({**THROUGHPUT, **size(3), "delay": 0.02}, {}),
        ({**THROUGHPUT, **size(3)}, {"num_requests": 3, **size(8)}),
        (THROUGHPUT, THROUGHPUT),
    ],
)
def test_what_was_saved_comes_back_over_what_the_archive_says(asked, changes):
    settings = settings_of({"yaml": asked})
    changed = settings.changed(changes)
    served = changed.batching
    chosen = [row.attribute for row in SAVED if row.name in changed.origins]
    names = ("size", "is_automatic", "delay", *chosen)
    saved = saved_entry(**{name: vars(served)[name] for name in names})
    by_requests = [row.key for row in SETTINGS if changed.origins.get(row.name) == "request"]
    restored = settings.restored(replace(saved, set_by_requests=tuple(by_requests)))
    assert restored.batching == served
    later_ones = (THROUGHPUT, TOGETHER, NO_HINT, {"max_latency": 0.2}, {"policy": "adaptive"})
    for later in (*later_ones, SIZE_UNSET, unset("performance_hint", "delay")):
        assert batching_or_error(restored, later) == batching_or_error(changed, later)


def batching_or_error(settings: ModelSettings, change: Fields) -> Batching | str:
    try:
        return settings.changed(change).batching
    except ValueError as error:
        return str(error)


def test_a_size_that_would_follow_anyway_stays_nobodys():
    saved = saved_entry(is_automatic=True, delay=0.1, policy="adaptive")
    restored = settings_of({"yaml": {}}).restored(saved)
    assert restored.batching == adaptive(size=MAX_AUTOMATIC_SIZE, is_automatic=True)
    assert restored.origins["batch_policy"] == "snapshot"
    assert not {"batch_size", "max_batch_delay"} & restored.origins.keys()


# -- profiling -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "sizes"),
    [
        ({}, []),
        ({"policy": "greedy", **size(8)}, []),
        ({"policy": "adaptive", **size(1)}, [1]),
        ({"policy": "adaptive", **size(8)}, [1, 2, 3, 4, 6, 8]),
        ({"policy": "adaptive", **size(10)}, [1, 2, 3, 4, 6, 8, 10]),
        ({"policy": "adaptive", "num_requests": 3}, [1, 2, 3]),
        (AUTO, [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128]),
        ({"compiled_sizes": (2, 5, 9)}, [2, 5, 9]),
        ({"compiled_sizes": (2, 5, 9), **size(5)}, [2, 5]),
        ({"compiled_sizes": (2, 5, 9), **size(1)}, [2]),
    ],
)
def test_sizes_are_tried_where_costs_are_asked_for(asked, sizes):
    assert sizes_to_try(resolved(asked)) == sizes


@given(st.integers(1, 2**31 - 1))
def test_never_more_sizes_than_there_is_time_for(size):
    sizes = sizes_to_try(adaptive(size=size))
    assert sizes == sorted(set(sizes))
    assert (sizes[0], sizes[-1]) == (1, size)
    assert len(sizes) < 64
