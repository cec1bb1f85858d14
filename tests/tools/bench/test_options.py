"""The command line of marserve bench: what it means, and which mistakes it tells."""

import json

import pytest

from marserve.frontend.configuration.model_schema import BATCH_POLICIES, REGISTERED
from marserve.tools.bench.errors import BenchError
from marserve.tools.bench.measurement import Point
from marserve.tools.bench.options import read_options, without_secrets


def test_by_default_eight_clients_for_ten_seconds():
    options = read_options(["m"])
    assert options.sweep.points() == [Point(clients=8)]
    assert (options.seconds, options.requests) == (10, None)
    assert options.target == "/predictions/m"
    assert options.headers == {}


def test_several_values_are_tried_with_each_other():
    options = read_options(["m", "--clients", "1, 8", "--rate", "50", "--batch-size", "4,8"])
    assert options.sweep.points() == [
        Point(clients=1, batch_size=4),
        Point(clients=8, batch_size=4),
        Point(rate=50, batch_size=4),
        Point(clients=1, batch_size=8),
        Point(clients=8, batch_size=8),
        Point(rate=50, batch_size=8),
    ]


def test_what_costs_most_to_change_changes_least_often():
    asked = ["--precision", "fp32,bf16", "--workers", "1,2", "--max-batch-delay", "0,5"]
    points = read_options(["m", *asked, "--torch-threads", "1"]).sweep.points()
    assert {point.torch_threads for point in points} == {1}
    assert [point.precision for point in points] == ["fp32"] * 4 + ["bf16"] * 4
    assert [point.workers for point in points] == [1, 1, 2, 2] * 2
    assert [point.max_batch_delay_ms for point in points] == [0, 5] * 4


def test_a_latency_goal_is_combined_with_the_policy_that_has_one():
    asked = ["--batch-policy", "fixed,adaptive", "--max-latency-ms", "10,20"]
    points = read_options(["m", *asked]).sweep.points()
    assert [(point.batch_policy, point.max_latency_ms) for point in points] == [
        ("fixed", None),
        ("adaptive", 10),
        ("adaptive", 20),
    ]


def test_the_server_decides_what_a_performance_hint_means():
    hints = ["--performance-hint", "latency,Throughput", "--performance-mode", "none"]
    assert [point.performance_hint for point in read_options(["m", *hints]).sweep.points()] == [
        "latency",
        "Throughput",
        "none",
    ]
    named = ["--performance-hint", "latency", "--batch-policy", "greedy"]
    assert read_options(["m", *named]).sweep.points() == [
        Point(clients=8, performance_hint="latency", batch_policy="greedy")
    ]


def test_lists_are_joined_when_an_option_is_given_again():
    asked = ["--clients", "1,2", "--clients", "8", "--input", "a", "--input", "b"]
    options = read_options(["m", *asked])
    assert [point.clients for point in options.sweep.points()] == [1, 2, 8]
    assert options.input == ["a", "b"]
    assert read_options(["m"]).input == []


@pytest.mark.parametrize(
    ("option", "values", "refused"),
    [
        ("performance_hint", ["latency", "THROUGHPUT"], "fast"),
        ("batch_size", [1, 128, "auto"], 0),
        ("max_batch_delay", [0, 50], -1),
        ("batch_policy", list(BATCH_POLICIES), "best"),
        ("max_latency_ms", [0, 50], -1),
        ("torch_threads", [1, 2, "auto"], 0),
        ("outstanding_batches", [1, 2, 4], 0),
    ],
)
def test_settings_of_models_may_be_what_the_server_takes(option, values, refused, capsys):
    (row,) = [row for row in REGISTERED if row.parameter == option]
    flag = f"--{option.replace('_', '-')}"
    assert getattr(read_options(["m", flag, ",".join(map(str, values))]), option) == values
    assert all(row.kind.accepts(value) for value in values)
    with pytest.raises(SystemExit):
        read_options(["m", f"{flag}={refused}"])
    assert flag in capsys.readouterr().err
    assert not row.kind.accepts(refused)


def test_a_value_that_is_named_twice_is_tried_once():
    assert read_options(["m", "--clients", "1,1"]).sweep.points() == [Point(clients=1)]


@pytest.mark.parametrize(
    ("arguments", "target"),
    [
        (["my model"], "/predictions/my%20model"),
        (["m", "--model-version", "2.0"], "/predictions/m/2.0"),
        (["m", "--path", "/v2/models/m/infer"], "/v2/models/m/infer"),
    ],
)
def test_where_it_posts(arguments, target):
    assert read_options(arguments).target == target


def test_headers():
    asked = ["--header", "X-Priority: high", "--header", "Empty:", "--content-type", "image/png"]
    options = read_options(["m", *asked, "--token", "secret"])
    assert options.headers == {
        "Authorization": "Bearer secret",
        "Content-Type": "image/png",
        "X-Priority": "high",
        "Empty": "",
    }
    assert options.management_headers == {}


def test_keys_of_a_key_file(tmp_path):
    file = tmp_path / "key_file.json"
    file.write_text(json.dumps({"inference": {"key": "i"}, "management": {"key": "m"}}))
    options = read_options(["m", "--key-file", str(file), "--management-token", "mine"])
    assert options.headers["Authorization"] == "Bearer i"
    assert options.management_headers["Authorization"] == "Bearer mine"


@pytest.mark.parametrize("text", [None, "nonsense", "{}", '{"inference": "x"}', "[]"])
def test_a_key_file_that_is_none_is_told(tmp_path, text):
    file = tmp_path / "key_file.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(BenchError, match=r"key_file\.json"):
        _ = read_options(["m", "--key-file", str(file)]).headers


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "required: MODEL"),
        (["m", "--clients", "0"], "'0' is not a whole number from 1 to 1000000000"),
        (["m", "--clients", "2.5"], "'2.5' is not a whole number from 1"),
        (["m", "--clients", "1,,2"], "'' is not a whole number"),
        (["m", "--rate", "-1"], "'-1' is not a number above 0"),
        (["m", "--rate", "nan"], "'nan' is not a number above 0"),
        (["m", "--rate", "inf"], "'inf' is not a number above 0"),
        (["m", "--timeout", "1e300"], "'1e300' is not a number above 0, at most 1000000000"),
        (["m", "--clients", "9" * 5000], "9' is not a whole number from 1"),
        (["m", "--seconds", "0"], "'0' is not a number above 0"),
        (["m", "--warm-up", "-1"], "'-1' is not a number, 0 or more"),
        (["m", "--max-error-percent", "101"], "'101' is not a number from 0 to 100"),
        (["m", "--max-batch-delay", "soon"], "'soon' is not a whole number, 0 or more"),
        (["m", "--batch-policy", "best"], "'best' is not one of fixed, greedy"),
        (["m", "--precision", "../x"], "'../x' is not the name of a precision"),
        (["m", "--header", "nonsense"], "'nonsense' is not a header"),
        (["m", "--arrivals", "bursts"], "invalid choice: 'bursts'"),
        (["m", "--seconds", "1", "--requests", "1"], "exclude each other"),
        (["m", "--input", "a", "--generate", "json"], "exclude each other"),
        (["m", "--path", "predictions/m"], "must begin with a slash"),
        (["m", "--client", "5"], "unrecognized arguments: --client 5 (did you mean --clients?)"),
        (["m", "--performance_hint=latency"], "(did you mean --performance-hint?)"),
        (["m", "--batch-size", "0"], "'0' is not a whole number, 1 or more, or auto"),
        (["m", "--nireq", "4"], "(here it is --clients)"),
        (["m", "--seed", "1", "--seed=2"], "--seed is given more than once; it takes one value."),
        (["m", "--json", "a", "--json", "b"], "--json is given more than once; it takes one"),
        (["m", "--xyzzy"], "unrecognized arguments: --xyzzy\n"),
        (["m", "--tolerance", "1"], "--tolerance is for --validate."),
        (["m", "--percentile", "90"], "--percentile is for --tune"),
        (["m", "--tune", "5", "--clients", "5"], "--clients: that is what --tune chooses"),
        (["m", "--tune", "5", "--max-batch-delay", "0"], "--max-batch-delay: that is what"),
        (["m", "--tune", "5", "--batch-size", "8,auto"], "--batch-size=auto: that is what --tune"),
        (["m", "--tune", "5", "--repeat", "2"], "--repeat: that is what --tune chooses"),
        (["m", "--tune", "5", "--precision", "fp32,bf16"], "--tune is for one --precision"),
    ],
)
def test_mistakes(arguments, sentence, capsys):
    with pytest.raises(SystemExit) as exit_info:
        read_options(arguments)
    assert exit_info.value.code == 2
    assert sentence in capsys.readouterr().err


def test_reports_do_not_tell_secrets():
    typed = ["m", "--token", "s1", "--management-token=s2", "--header", "Authorization: s3"]
    output = " ".join(without_secrets([*typed, "--clients", "1"]))
    assert output == "m --token ... --management-token=... --header ... --clients 1"
