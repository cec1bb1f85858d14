"""What operators find in the log files, and on the console."""

import re

import pytest

pytestmark = pytest.mark.integration

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d,\d{3}"

TALKATIVE = """
import logging, sys
logging.basicConfig(level=logging.DEBUG)
logging.getLogger("mine").info("logged at import")

def handle(data, context):
    if data is None:
        print("printed at load")
        return None
    print("printed to stdout")
    print("printed to stderr", file=sys.stderr)
    print("gr\\u00fc\\u00dfe")
    logging.getLogger("mine").warning("logged as a warning")
    return ["said"] * len(data)
"""


@pytest.fixture(scope="module", autouse=True)
def models(server, handlers):
    server.install(TALKATIVE, "talkative")
    server.install(handlers / "lab.py", "lab")


def lines(server, name, text):
    server.wait_logged(name, text)
    return [line for line in server.log(name).splitlines() if text in line]


def test_the_access_log(server):
    server.predict("talkative", params={"a": "1"})
    (line, *_) = lines(server, "access_log.log", "/predictions/talkative")
    assert re.fullmatch(
        TIME + r' - /127\.0\.0\.1:\d+ "POST /predictions/talkative\?a=1 HTTP/1\.1" 200 \d+', line
    )


def test_the_access_log_has_failures_and_other_listeners(server):
    server.predict("nobody")
    server.management("GET", "/models/nobody-else")
    assert lines(server, "access_log.log", '"POST /predictions/nobody HTTP/1.1" 404 ')
    assert lines(server, "access_log.log", '"GET /models/nobody-else HTTP/1.1" 404 ')


def test_a_request_cannot_forge_a_line(server):
    server.exchange(
        "inference",
        b"GET /x\x1b[31m\x0bforged HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n",
    )
    server.predict("after-the-forgery")
    server.wait_logged("access_log.log", "after-the-forgery")
    for line in server.log("access_log.log").splitlines():
        assert re.match(TIME + r' - /127\.0\.0\.1:\d+ "', line)
        assert line.isprintable()


@pytest.mark.parametrize(
    ("text", "level", "stream"),
    [
        ("printed at load", "INFO ", "stdout"),
        ("logged at import", "INFO ", "stdout"),
        ("printed to stdout", "INFO ", "stdout"),
        ("grüße", "INFO ", "stdout"),
        ("logged as a warning", "INFO ", "stdout"),
        ("printed to stderr", "WARN ", "stderr"),
    ],
)
def test_the_model_log(server, text, level, stream):
    server.predict("talkative")
    (line, *_) = lines(server, "model_log.log", text)
    expected = rf"{TIME} \[{level}\] W-\d+-talkative_1\.0-{stream} MODEL_LOG - .*{text}"
    assert re.fullmatch(expected, line)
    assert text in server.console_text()


def test_what_a_worker_says_at_its_start(server):
    for text in ("Torch worker started.", "Python runtime: 3.", "[PID]"):
        assert lines(server, "model_log.log", text)


def test_lines_that_operators_grep(server):
    ports = server.ports
    expected = [
        "Model server started.",
        f"Inference API bind to: http://127.0.0.1:{ports['inference']}",
        f"Management API bind to: http://127.0.0.1:{ports['management']}",
        f"Metrics API bind to: http://127.0.0.1:{ports['metrics']}",
        "Model talkative loaded.",
        "State change WORKER_STARTED -> WORKER_MODEL_LOADED",
    ]
    for text in expected:
        assert text in server.log("ts_log.log"), text
        assert text in server.console_text(), text


def test_lines_about_a_worker_that_died(server):
    server.ask("lab", do="os._exit")
    number = server.worker("lab")["id"]
    for text in (
        "Worker disconnected. WORKER_MODEL_LOADED",
        "Backend worker error",
        f"Retry worker: {number} in 1 seconds.",
    ):
        server.wait_logged("ts_log.log", text)
    assert server.ask("lab", id=1).status_code == 200


def test_each_line_of_the_server_log_stands_there_once(server):
    log = server.log("ts_log.log").splitlines()
    assert sum("Model server started." in line for line in log) == 1
    assert all(re.match(rf"{TIME} \[(INFO |WARN |ERROR|DEBUG)\] ", line) for line in log)


def test_the_places_of_the_logs_can_be_chosen(prepare_server, tmp_path):
    places = {"LOG_LOCATION": str(tmp_path / "l"), "METRICS_LOCATION": str(tmp_path / "m")}
    with prepare_server(places) as server:
        server.start()
        server.stop()
        assert not (server.directory / "logs").exists()
    assert (tmp_path / "l" / "ts_log.log").stat().st_size
    assert (tmp_path / "m" / "ts_metrics.log").exists()
