import asyncio
import json
import logging
import re

import pytest

from marserve.frontend.telemetry.access_log import AccessLog
from marserve.frontend.telemetry.metrics import Metrics
from marserve.frontend.telemetry.trace_context import ClientTrace


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, logger="ACCESS_LOG")
    return lambda: [
        line
        for record in caplog.records
        if record.name == "ACCESS_LOG"
        for line in record.getMessage().split("\n")
    ]


TRACE = ClientTrace("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00")


def add(log: AccessLog, target: str = "/ping") -> None:
    log.add("127.0.0.1:5000", "GET", target, 200, 0.0126)


def test_a_line_has_the_format_of_torchserve(loop, lines):
    log = AccessLog(loop, Metrics("host"))
    add(log, "/predictions/m?x=1")
    log.flush()
    [line] = lines()
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d,\d{3} - "
        r'/127\.0\.0\.1:5000 "GET /predictions/m\?x=1 HTTP/1\.1" 200 13',
        line,
    )


def test_a_line_can_be_json(loop, lines):
    log = AccessLog(loop, Metrics("host"), as_json=True)
    add(log, '/x"\u2028')
    log.flush()
    [line] = lines()
    members = json.loads(line)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d,\d{3}", members.pop("time"))
    assert members == {
        "peer": "127.0.0.1:5000",
        "method": "GET",
        "path": '/x"\u2028',
        "status": 200,
        "milliseconds": 13,
    }


def test_a_line_names_the_trace_of_the_request(loop, lines):
    log = AccessLog(loop, Metrics("host"))
    log.add("127.0.0.1:5000", "GET", "/ping", 200, 0.0126, "id", None, TRACE)
    log.add("127.0.0.1:5000", "GET", "/ping", 200, 0.0126, "id", "order-7", TRACE)
    log.add_call("127.0.0.1:5000", "a.B/C", 0, 200, 0.0126, "id", None, "m", TRACE)
    log.flush()
    assert [line.partition(" 13")[2] for line in lines()] == [
        f" trace_id={TRACE.trace_id}",
        f" request_id=id client_request_id=order-7 trace_id={TRACE.trace_id}",
        f" model=m trace_id={TRACE.trace_id}",
    ]


def test_json_always_has_the_id_of_the_request(loop, lines):
    log = AccessLog(loop, Metrics("host"), as_json=True)
    log.add("127.0.0.1:5000", "GET", "/ping", 200, 0.0126, "id")
    log.add("127.0.0.1:5000", "GET", "/ping", 200, 0.0126, "id", None, TRACE)
    log.flush()
    plain, traced = map(json.loads, lines())
    assert (plain["request_id"], "trace_id" in plain) == ("id", False)
    assert (traced["request_id"], traced["trace_id"]) == ("id", TRACE.trace_id)


@pytest.mark.parametrize("client_id", ["a", "!~:/\"'", "x" * 128])
def test_the_id_of_a_client_is_logged_with_that_of_the_server(client_id, loop, lines):
    sent = ("127.0.0.1:5000", "POST", "/predictions/m", 200, 0.001, "an-id", client_id)
    for log in (AccessLog(loop, Metrics("host"), as_json=as_json) for as_json in (False, True)):
        log.add(*sent)
        log.flush()
    text, members = lines()
    assert text.endswith(f'HTTP/1.1" 200 1 request_id=an-id client_request_id={client_id}')
    assert json.loads(members)["client_request_id"] == client_id
    assert json.loads(members)["request_id"] == "an-id"


@pytest.mark.parametrize("client_id", [None, "", "two words", "\xe9", "a\n", "x" * 129])
def test_other_ids_of_clients_are_not_logged(client_id, loop, lines):
    log = AccessLog(loop, Metrics("host"))
    log.add("p", "POST", "/", 200, 0.001, "an-id", client_id)
    log.flush()
    assert lines()[0].endswith('HTTP/1.1" 200 1')


def test_a_call_names_its_model(loop, lines):
    for log in (AccessLog(loop, Metrics("host"), as_json=as_json) for as_json in (False, True)):
        log.add_call("p", "S/M", 0, 200, 0.003, "an-id", "mine", "a\nb")
        log.flush()
    text, members = lines()
    ids = "request_id=an-id client_request_id=mine"
    assert text.endswith(rf'"gRPC S/M HTTP/2.0" 0 3 model=a\nb {ids}')
    assert json.loads(members)["model"] == "a\nb"


def test_a_line_is_written_with_its_answer(run, lines):
    async def scenario():
        log = AccessLog(asyncio.get_running_loop(), Metrics("host"))
        for number in range(1, 50):
            add(log)
            await asyncio.sleep(0.00401)
            assert len(lines()) == number

    run(scenario())


def test_lines_of_very_many_answers_are_written_together_a_little_later(run, lines):
    async def scenario():
        log = AccessLog(asyncio.get_running_loop(), Metrics("host"))
        for _ in range(200):  # in one moment
            add(log)
        await asyncio.sleep(0)
        for _ in range(200):
            add(log)
        await asyncio.sleep(0)
        assert len(lines()) == 200
        await asyncio.sleep(0.021)
        assert len(lines()) == 400

    run(scenario())


def test_a_full_buffer_is_written_without_delay(run, lines):
    async def scenario():
        log = AccessLog(asyncio.get_running_loop(), Metrics("host"))
        for _ in range(1000):
            add(log)
        assert len(lines()) == 3 * 256
        await asyncio.sleep(0.021)
        assert len(lines()) == 1000

    run(scenario())


@pytest.mark.parametrize("target", ["/a\x1b[31m", "/a\u2028b", "/a\udcff", "/a\x00"])
def test_control_characters_are_escaped_in_the_log(target, loop, lines):
    log = AccessLog(loop, Metrics("host"))
    add(log, target)
    log.flush()
    [line] = lines()
    assert line.isprintable()
    assert "/a" in line


def test_nothing_is_written_when_the_level_is_off(loop, caplog):
    caplog.set_level(logging.WARNING, logger="ACCESS_LOG")
    log = AccessLog(loop, Metrics("host"))
    add(log)
    log.flush()
    log.flush()
    assert caplog.records == []
