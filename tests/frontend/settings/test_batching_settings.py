import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marserve.frontend.batching.jobs import Priority
from marserve.frontend.batching.options import MAX_AUTOMATIC_SIZE, Batching
from marserve.frontend.configuration.config import Config
from marserve.frontend.errors import ArchiveRefused, BadRequest, ServeError
from marserve.frontend.settings.batching_settings import (
    change_batching,
    resolve_batching,
    restore_batching,
    sizes_to_try,
)
from marserve.frontend.settings.model_settings import models_settings, server_settings
from marserve.frontend.settings.model_yaml import yaml_settings

Fields = dict[str, Any]
AUTO = {"is_automatic": True}


def adaptive(**settings: Any) -> Batching:
    """By length where that pays, unless somebody says otherwise."""
    return Batching(policy="adaptive", bucket_by="auto", **settings)


def size(count: int) -> Fields:
    return {"size": count, "is_automatic": False}


def resolved(
    request: Fields | None = None, yaml: Fields | None = None, models: Fields | None = None
) -> Batching:
    batching, _ = resolve_batching(
        {"request": request or {}, "yaml": yaml or {}, "models": models or {}}
    )
    return batching


def of_server(config: Config, mode: str = "") -> Fields:
    names = ("policy", "queue_size", "is_queue_bounded")
    found = server_settings(config, mode)
    return {name: found[name] for name in names if name in found}


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
def test_request_before_yaml_before_models(
    attribute: str, name: str, values: tuple[Any, ...], first: int
) -> None:
    origins = ("request", "yaml", "models")
    asked: dict[str, Fields] = {origin: {} for origin in origins}
    for origin, value in list(zip(origins, values, strict=True))[first:]:
        asked[origin] = {attribute: value}
    batching, decided = resolve_batching(asked)
    assert getattr(batching, attribute) == values[first]
    assert decided[name] == origins[first]


def test_where_nobody_says_anything_it_is_torchserves(config: Config) -> None:
    batching, origins = resolve_batching({"server": of_server(config)})
    assert batching == Batching(is_queue_bounded=False)
    assert origins == {
        "batch_size": "default",
        "max_batch_delay": "default",
        "batch_policy": "server",
        "job_queue_size": "server",
    }


def test_the_bound_of_the_queue_is_somebodys_where_it_was_written_down(config: Config) -> None:
    chosen = replace(config, job_queue_size=100, texts={"job_queue_size": "100"})
    assert resolve_batching({"server": of_server(chosen)})[0].is_queue_bounded
    yaml = yaml_settings({"jobQueueSize": 100})
    assert resolve_batching({"yaml": yaml, "server": of_server(config)})[0].is_queue_bounded


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
def test_what_nobody_says_follows_from_the_rest(asked: Fields, expected: Batching) -> None:
    assert resolved(asked) == expected
    assert resolved(yaml=asked) == expected


def test_a_goal_beats_a_weaker_policy_and_a_policy_a_weaker_goal() -> None:
    goal, greedy = {"max_latency": 0.05}, {"policy": "greedy"}
    assert resolved(goal, greedy).policy == "adaptive"
    assert resolved(greedy, goal) == Batching(policy="greedy")
    _, origins = resolve_batching({"request": greedy, "yaml": goal})
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
def test_a_contradiction_is_reported_to_whose_it_is(
    sources: dict[str, Fields], error: type[ServeError], words: str
) -> None:
    ranked = {origin: sources.get(origin, {}) for origin in ("request", "yaml", "models")}
    with pytest.raises(error, match="^" + re.escape(words) if "models" in words else words):
        resolve_batching(ranked)


def test_what_the_request_mends_is_no_contradiction() -> None:
    mended = resolved({"policy": "adaptive"}, TWO_MINDS)
    assert (mended.policy, mended.max_latency) == ("adaptive", 0.05)


@pytest.mark.parametrize("key", ["asyncCommunication", "continuousBatching"])
@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"policy": "greedy"}, "batch_policy=greedy"),
        ({"max_latency": 0.05}, "batch_policy=adaptive"),
        (AUTO, "batch_size=auto"),
        ({"compiled_sizes": (1, 4)}, "compiled_batch_sizes=1,4"),
        ({"splits_lists": True}, "dynamicBatchSize=true"),
    ],
)
def test_where_there_are_no_batches_to_form_there_is_only_fixed(
    key: str, asked: Fields, words: str
) -> None:
    with pytest.raises(BadRequest, match=f"^{words} has no meaning beside {key}"):
        resolve_batching({"request": asked}, key)
    with pytest.raises(ArchiveRefused, match=f"{words} has no meaning beside {key}"):
        resolve_batching({"yaml": asked}, key)
    batching, origins = resolve_batching({"request": size(4)}, key)
    with pytest.raises(ValueError, match=f"{words} has no meaning"):
        change_batching(batching, origins, asked, mode=key)


def test_the_servers_policy_is_not_for_them(config: Config) -> None:
    mode, chosen = "continuousBatching", replace(config, default_batch_policy="adaptive")
    assert resolve_batching({"server": of_server(chosen, mode)}, mode)[0].policy == "fixed"
    assert resolve_batching({"server": of_server(chosen)})[0].policy == "adaptive"


# -- yaml and models= ------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["batchSize", "maxBatchDelay", "jobQueueSize"])
def test_wrong_values_of_torchserves_keys_are_reported_and_ignored(
    key: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert yaml_settings({key: "8", "numRequests": 2}) == {"num_requests": 2}
    assert f"model-config.yaml: {key}='8' is ignored, it takes a whole number" in caplog.text


@pytest.mark.parametrize(
    "key", ["maxBatchSize", "batchPolicy", "maxLatencyMs", "compiledBatchSizes", "isolateFailures"]
)
def test_wrong_values_of_new_keys_refuse_the_archive(key: str) -> None:
    with pytest.raises(ArchiveRefused, match=f"^model-config.yaml: {key}=8s: it is "):
        yaml_settings({key: "8s"})


def test_seats_are_those_of_priorities() -> None:
    asked = {"priorityQueueSizes": {"high": 2, "low": 3}}
    assert yaml_settings(asked)["capacities"] == {Priority.HIGH: 2, Priority.LOW: 3}
    assert models_settings(asked)["capacities"] == {Priority.HIGH: 2, Priority.LOW: 3}


def test_models_with_two_minds_about_a_size() -> None:
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
def test_a_change_is_one_more_layer(asked: Fields, changes: Fields, expected: Batching) -> None:
    batching, origins = resolve_batching({"yaml": asked})
    changed, _ = change_batching(batching, origins, changes)
    assert changed == expected


def test_a_change_says_that_it_decided() -> None:
    batching, origins = resolve_batching({"yaml": {**size(8), "num_requests": 2}})
    _, origins = change_batching(batching, origins, {"num_requests": 3})
    assert (origins["num_requests"], origins["batch_size"]) == ("request", "yaml")


@pytest.mark.parametrize("changes", [{"compiled_sizes": (1, 4)}, TWO_MINDS])
def test_a_change_that_contradicts_is_refused(changes: Fields) -> None:
    batching, origins = resolve_batching({"yaml": size(8)})
    with pytest.raises(ValueError, match=r"batch_size=8|max_latency_ms=50"):
        change_batching(batching, origins, changes)


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
    ],
)
def test_what_was_saved_comes_back_over_what_the_archive_says(
    asked: Fields, changes: Fields
) -> None:
    batching, origins = resolve_batching({"yaml": asked})
    served, _ = change_batching(batching, origins, changes)
    saved = {name: getattr(served, name) for name in ("delay", "policy", "max_latency")}
    saved |= {"compiled_sizes": served.compiled_sizes, "queue_size": served.queue_size}
    saved |= {"is_automatic": True} if served.is_automatic else size(served.size)
    restored, _ = restore_batching(batching, origins, saved)
    assert restored == served


def test_a_size_that_would_follow_anyway_stays_nobodys() -> None:
    batching, origins = resolve_batching({"yaml": {}})
    saved = {"policy": "adaptive", "is_automatic": True, "delay": 0.1}
    restored, decided = restore_batching(batching, origins, saved)
    assert restored == adaptive(size=MAX_AUTOMATIC_SIZE, is_automatic=True)
    assert (decided["batch_size"], decided["batch_policy"]) == ("default", "snapshot")
    assert decided["max_batch_delay"] == "default"


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
def test_sizes_are_tried_where_costs_are_asked_for(asked: Fields, sizes: list[int]) -> None:
    assert sizes_to_try(resolved(asked)) == sizes


@given(st.integers(1, 2**31 - 1))
def test_never_more_sizes_than_there_is_time_for(size: int) -> None:
    sizes = sizes_to_try(adaptive(size=size))
    assert sizes == sorted(set(sizes))
    assert (sizes[0], sizes[-1]) == (1, size)
    assert len(sizes) < 64
