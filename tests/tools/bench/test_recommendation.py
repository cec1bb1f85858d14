import json
import shlex
from dataclasses import replace
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from measurements import run

from marserve.frontend.archives.contents import read_model_yaml
from marserve.frontend.configuration.config import Config
from marserve.frontend.configuration.model_schema import REGISTERED
from marserve.frontend.configuration.models_key import model_entries, unread_model_settings
from marserve.frontend.settings.model_settings import (
    ModelSettings,
    resolve_settings,
)
from marserve.tools.bench.measurement import Point
from marserve.tools.bench.recommendation import Choice, Goal, Recommendation, Trial

TORCHSERVE = Point(workers=2, batch_size=8, max_batch_delay_ms=5)
ADAPTIVE = Point(
    workers=3, batch_size=16, batch_policy="adaptive", max_batch_delay_ms=20, max_latency_ms=50
)
CONFIG = Config(model_store=Path("models"))
GREEDY = Point(workers=1, batch_size=4, batch_policy="greedy")
OWN_THREADS = Point(workers=1, batch_size=4, torch_threads=1, outstanding_batches=2)


def recommended(point: Point) -> Recommendation:
    return Recommendation(Goal(), Choice(run(point), run(point)), [])


def settled(yaml: dict[str, object], numbers: dict[str, object]) -> ModelSettings:
    return resolve_settings(
        {}, yaml, numbers, CONFIG, gpus=0, default_workers=1, at_start=bool(numbers)
    )


def check(found: ModelSettings, point: Point) -> None:
    batching = found.batching
    assert (found.min_workers, found.max_workers) == (point.workers, point.workers)
    assert (batching.size, batching.is_automatic) == (point.batch_size, False)
    assert batching.policy == (point.batch_policy or "fixed")
    if point.max_batch_delay_ms is not None:
        assert batching.delay == point.max_batch_delay_ms / 1000
    assert found.torch_threads == (point.torch_threads or 0)
    assert found.outstanding_batches == point.outstanding_batches
    assert batching.max_latency == (point.max_latency_ms or 0) / 1000


@pytest.mark.parametrize("point", [TORCHSERVE, ADAPTIVE, GREEDY, OWN_THREADS])
def test_the_yaml_lines_are_what_the_server_reads(point, tmp_path):
    file = tmp_path / "model-config.yaml"
    file.write_text("\n".join(recommended(point).yaml_lines()))
    check(settled(dict(read_model_yaml(file)), {}), point)


@pytest.mark.parametrize("point", [TORCHSERVE, ADAPTIVE, GREEDY, OWN_THREADS])
def test_the_line_of_config_properties_is_what_the_server_reads(point):
    key, _, text = recommended(point).properties_line("resnet 2.0").partition("=")
    assert key == "models"
    assert list(unread_model_settings(text)) == []
    check(settled({}, dict(model_entries(text)["resnet"]["2.0"])), point)


@pytest.mark.parametrize("point", [TORCHSERVE, ADAPTIVE, GREEDY, OWN_THREADS])
def test_the_register_call_has_the_parameters_of_a_registration(point):
    program, *_, url = shlex.split(recommended(point).register_call("resnet 2.0"))
    query = {name: value for name, (value,) in parse_qs(urlsplit(url).query).items()}
    assert program == "curl"
    assert query.pop("url") == "resnet.mar"
    assert query.pop("initial_workers") == str(point.workers)
    assert query.pop("batch_size") == str(point.batch_size)
    assert query.keys() <= {item.parameter for item in REGISTERED}


@pytest.mark.parametrize(
    ("management_url", "words"),
    [
        ("https://models.example:9081/", ["https://models.example:9081/models"]),
        ("unix:/run/my server/m", ["--unix-socket", "/run/my server/m", "http://localhost/models"]),
    ],
)
def test_the_register_call_goes_to_the_management_listener(management_url, words):
    found = replace(recommended(GREEDY), management_url=management_url)
    *command, url = shlex.split(found.register_call("resnet"))
    assert [*command, url.partition("?")[0]] == ["curl", "-X", "POST", *words]


def test_to_torchserve_nothing_is_said_that_it_does_not_know():
    lines = recommended(TORCHSERVE).yaml_lines()
    assert lines == ["minWorkers: 2", "maxWorkers: 2", "batchSize: 8", "maxBatchDelay: 5"]


def test_a_precision_goes_where_the_handler_reads_it(tmp_path):
    found = recommended(Point(workers=1, batch_size=1, precision="bf16"))
    file = tmp_path / "model-config.yaml"
    file.write_text("\n".join(found.yaml_lines()))
    assert read_model_yaml(file)["optimization"] == {"precision": "bf16"}
    assert "bf16" not in found.register_call("resnet") + found.properties_line("resnet")


def test_the_text_has_evidence_lines_to_paste_and_what_was_rejected():
    full = run(Point(clients=16, workers=1, batch_size=8), [40.0] * 100, seconds=0.5)
    opened = run(Point(rate=160, workers=1, batch_size=8), [30.0] * 80, seconds=0.5)
    worse = run(Point(clients=2, workers=1, batch_size=1), [20.0] * 50, seconds=0.5)
    failed = run(Point(clients=32, workers=1, batch_size=16), [], errors={"507": 9})
    trials = [
        Trial.judged(worse, Goal(), 0.0),
        Trial.judged(full, Goal(), 0.0),
        Trial.judged(failed, Goal(), 0.0),
        Trial.judged(opened, Goal(), 0.0),
    ]
    text = Recommendation(Goal(), Choice(full, opened), trials).text("resnet")
    rejected, verdict, yaml, _, _ = text.split("\n\n")
    assert verdict.splitlines() == [
        "Recommended for p99 within 50 ms: 1 worker, batch size 8.",
        "At full load (16 clients): 200 answers/s, p99 40 ms.",
        "Confirmed in an open loop (160 requests/s): 160 answers/s, p99 30 ms.",
    ]
    assert yaml.splitlines()[0] == "model-config.yaml:"
    heading, one, other = (line.split(maxsplit=4) for line in rejected.splitlines())
    assert heading[0] == "clients"
    assert one == ["2", "1", "100", "20", "50% less throughput"]
    assert other == [
        "32",
        "16",
        "FAILED",
        "-",
        "Not one request was answered with success: 507 (9).",
    ]


@pytest.mark.parametrize(
    ("point", "latency_ms", "fault"),
    [
        (Point(clients=1), 50.0, ""),
        (Point(clients=1), 75.0, "over the goal by 50%"),
        (Point(rate=100), 40.0, "only 80 of 100 requests/s were answered"),
        (Point(rate=84), 40.0, ""),
    ],
)
def test_a_run_is_held_against_the_goal(point, latency_ms, fault):
    found = Trial.judged(run(point, [latency_ms] * 80, seconds=1), Goal(), 0.0)
    assert (found.fault, found.is_useless) == (fault, False)


@pytest.mark.parametrize(
    ("percent", "latency_ms"), [(0, 50), (100, 50), (99, 0), (99, -1), (99, float("inf"))]
)
def test_a_goal_that_means_nothing_is_refused(percent, latency_ms):
    with pytest.raises(ValueError, match="goal is"):
        Goal(percent=percent, latency_ms=latency_ms)


def test_a_name_with_quotes_stays_one_word_of_the_shell():
    found = recommended(TORCHSERVE)
    assert len(shlex.split(found.register_call("a'$(reboot)'"))) == 4
    assert "a'" in json.loads(found.properties_line("a'").partition("=")[2])
