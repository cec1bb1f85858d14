"""marserve doctor --compare: two servers are asked the same."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from servers import make_archive, wait_for

from marserve.tools.doctor.comparison.main import main
from marserve.tools.doctor.comparison.options import build_parser
from marserve.tools.doctor.errors import DoctorError

pytestmark = pytest.mark.integration

PAGE = Path(__file__).parents[2] / "docs" / "doctor.md"

HANDLER = """
import itertools
import time

calls = itertools.count()

def handle(data, context):
    if data is None:
        return
    answers = []
    for index, row in enumerate(data):
        body = row.get("body") or row.get("data")
        if body == {"x": "bad"}:
            raise ValueError("bad input")
        if body == {"x": "random"}:
            body = {"x": time.time() % 1 * 1000}
            context.set_response_header(index, "x-time", str(time.time_ns()))
        context.set_response_header(index, "x-model", HEADER)
        context.set_response_status(STATUS, index)
        time.sleep(SECONDS)
        answers.append({"y": body["x"] * 2.0 + ADDED, "id": next(calls)})
    return answers
"""
STREAMER = """
from ts.handler_utils.utils import send_intermediate_predict_response

def handle(data, context):
    if data is None:
        return
    if STREAMS:
        for piece in ("a", "b"):
            send_intermediate_predict_response(
                [piece], context.request_ids, "ok", 200, context)
        return ["c"]
    return ["abc"]
"""


def handler(template=HANDLER, **values):
    settings = {"HEADER": "one", "STATUS": 200, "ADDED": 0.0, "SECONDS": 0, **values}
    return "".join(f"{name} = {value!r}\n" for name, value in settings.items()) + template


def is_ready(server):
    return server.inference("GET", "/ready").ok


@pytest.fixture(scope="module")
def servers(prepare_server):
    """Two servers; models of the same name may differ."""
    differing = {
        "same": {},
        "close": {"ADDED": 1e-6},
        "number": {"ADDED": 0.5},
        "header": {"HEADER": "two"},
        "status": {"STATUS": 404},
        "slow": {"SECONDS": 0.02},
    }
    properties = {"default_workers_per_model": "1"}
    with prepare_server(**properties) as old, prepare_server(**properties) as new:
        for name, values in differing.items():
            make_archive(old.store, handler(), name)
            make_archive(new.store, handler(**values), name)
        make_archive(old.store, handler(STREAMER, STREAMS=True), "pieces")
        make_archive(new.store, handler(STREAMER, STREAMS=False), "pieces")
        make_archive(old.store, handler(), "gone")
        for server in (old, new):
            server.launch("--models", "all")
        for server in (old, new):
            server.wait_ready()
            wait_for(partial(is_ready, server))
        yield old, new


@pytest.fixture
def compare(servers, capsys):
    urls = [f"http://127.0.0.1:{server.ports['inference']}" for server in servers]

    def compare(*arguments):
        status = main([*urls, "--ignore-member", "id", "--repeat", "3", *map(str, arguments)])
        return status, capsys.readouterr().out

    return compare


@pytest.fixture
def inputs(tmp_path):
    folder = tmp_path / "inputs"
    folder.mkdir()
    for number in range(4):
        (folder / f"{number}.json").write_text(json.dumps({"x": number}))
    return folder


def test_the_same_answers(compare, inputs):
    status, printed = compare("--model", "same", "--input", inputs)
    assert status == 0, printed
    assert printed.endswith("4 of 4 requests have the same answer from both.\n")
    assert "Latency, 8 pairs" in printed


def test_numbers_within_the_tolerance(compare, inputs):
    status, printed = compare("--model", "close", "--input", inputs)
    assert status == 0, printed
    assert "numbers differ by 1e-06 at most" in printed
    status, _ = compare("--model", "close", "--input", inputs, "--tolerance", 1e-9)
    assert status == 1


def test_another_number(compare, inputs):
    status, printed = compare("--model", "number", "--input", inputs)
    assert status == 1
    assert "POST /predictions/number (0.json): y: 0.0 and 0.5 [body]" in printed
    assert "0 of 4 requests" in printed


def test_another_header(compare, inputs):
    status, printed = compare("--model", "header", "--input", inputs)
    assert status == 1
    assert "(0.json) and 3 more: header x-model: one and two [header]" in printed
    status, printed = compare("--model", "header", "--input", inputs, "--ignore-header", "X-Model")
    assert status == 0, printed


def test_another_status(compare, inputs):
    status, printed = compare("--model", "status", "--input", inputs)
    assert status == 1
    assert "status 200 and 404" in printed
    assert "[status]" in printed
    status, _ = compare("--model", "status", "--input", inputs, "--ignore", "status")
    assert status == 0


def test_a_model_that_is_not_there(compare, inputs):
    status, printed = compare("--model", "gone", "--input", inputs)
    assert status == 1
    assert 'status 200 and 404 "Model not found: gone"' in printed


def test_an_answer_in_pieces(compare, inputs):
    status, printed = compare("--model", "pieces", "--input", inputs)
    assert status == 0, printed
    assert "only the old server sends it in pieces [streaming]" in printed
    status, _ = compare("--model", "pieces", "--input", inputs, "--strict")
    assert status == 1


def test_a_slower_server(compare, inputs):
    status, printed = compare("--model", "slow", "--input", inputs, "--max-ratio", 100)
    assert status == 0, printed
    status, printed = compare("--model", "slow", "--input", inputs, "--max-ratio", 1.5)
    assert status == 1
    assert "1.5 are allowed [slower]" in printed


def test_answers_that_are_never_the_same(compare, tmp_path):
    file = tmp_path / "requests.jsonl"
    paths = {"path": "/predictions/number"}
    file.write_text(
        "\n".join(json.dumps({**paths, "body": {"x": x}}) for x in ("random", "bad", 1))
    )
    status, printed = compare("--requests", file, "--ignore", "body")
    assert status == 0, printed
    assert "responses of the old server also differ from each other: y: " in printed
    assert "differ from each other: header x-time: " in printed
    assert printed.count("[unsteady]") == 2


def test_errors_that_are_the_same_on_both(compare, tmp_path):
    file = tmp_path / "requests.jsonl"
    file.write_text(json.dumps({"path": "/predictions/same", "body": {"x": "bad"}}))
    status, printed = compare("--requests", file)
    assert status == 0
    assert printed == "1 of 1 requests have the same answer from both.\n"


def test_an_access_log_of_the_old_server(servers, compare, inputs):
    old, _ = servers
    compare("--model", "same", "--input", inputs)
    status, printed = compare(
        "--requests", old.directory / "logs" / "access_log.log", "--input", inputs, "--limit", 3
    )
    assert status in (0, 1)
    assert "of 3 requests" in printed


def test_the_report_as_json(compare, inputs):
    status, printed = compare("--model", "number", "--input", inputs, "--json", "--repeat", "30")
    document = json.loads(printed)
    assert status == document["status"] == 1
    assert document["counts"]["blocks"] == 4
    assert document["findings"][0]["rule"] == "body"
    found = document["comparison"]
    assert (found["requests"], found["same"]) == (4, 0)
    latency = found["latency_ms"]
    assert latency["pairs"] == 4 * 29
    assert latency["median"]["old"] <= latency["p99"]["old"]
    low, high = latency["ratio_spread"]
    assert low <= latency["ratio"] <= high


def test_a_server_that_is_not_there(servers, inputs):
    old, _ = servers
    url = f"http://127.0.0.1:{old.ports['inference']}"
    with pytest.raises(DoctorError, match=r"Nothing answers at http://127\.0\.0\.1:1: "):
        main([url, "http://127.0.0.1:1", "--model", "same", "--input", str(inputs)])


def test_omitted_requests_are_named(servers, tmp_path):
    urls = [f"http://127.0.0.1:{server.ports['inference']}" for server in servers]
    changes = [{"method": "DELETE", "path": f"/models/m{number}"} for number in range(12)]
    file = tmp_path / "requests.json"
    file.write_text(json.dumps([{"path": "/ping"}, *changes, *changes]))
    marserve = Path(sys.executable).with_name("marserve")
    line = [marserve, "doctor", "--compare", *urls, "--requests", file]
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    omitted, *rest = done.stderr.splitlines()
    names = ", ".join(f"DELETE /models/m{number}" for number in range(10))
    assert (omitted, rest) == (
        "24 requests are omitted, because they may change the server: "
        f"{names} and 2 more (--verbose)",
        [],
    )


def test_by_the_command(servers, inputs):
    urls = [f"http://127.0.0.1:{server.ports['inference']}" for server in servers]
    marserve = Path(sys.executable).with_name("marserve")
    line = [marserve, "doctor", "--compare", *urls, "--repeat", "1"]
    what = ["--model", "number", "--input", inputs]
    done = subprocess.run([*line, *what], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "y: 0.0 and 0.5 [body]" in done.stdout
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("marserve doctor: There is nothing to send")


def test_its_options_are_on_the_page():
    text = PAGE.read_text(encoding="utf-8").partition("## Comparing two servers")[2]
    section = text.partition("\n## ")[0]
    flags = {flag for action in build_parser()._actions for flag in action.option_strings}
    left_out = {"-h", "--help", "--insecure", "--verbose"}
    assert {flag for flag in flags - left_out if flag not in section} == set()
