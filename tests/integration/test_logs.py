"""What operators find in the log files, and on the console."""

import json
import os
import re
import shutil
import signal
import time

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

IDS = """
def handle(data, context):
    return None if data is None else [context.get_request_id(0)]
"""


@pytest.fixture(scope="module")
def server(start_server):
    """Return a server that other modules do not use, because its logs of the start are read."""
    with start_server() as server:
        yield server


@pytest.fixture(scope="module", autouse=True)
def models(server, handlers):
    server.install(TALKATIVE, "talkative")
    server.install(handlers / "lab.py", "lab")
    server.install(IDS, "ids")


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


def test_a_line_is_written_with_its_answer(server):
    """It came half a second later."""
    began = time.monotonic()
    for number in range(20):
        server.predict("ids", params={"early": number})
        server.wait_logged("access_log.log", f"early={number} ")
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("chunked", [False, True])
def test_the_id_of_a_client_is_in_the_log_only(server, chunked):
    body = iter([b"x"]) if chunked else b"x"
    answer = server.predict("ids", data=body, headers={"X-Request-Id": f"order-{chunked}"})
    own = answer.headers["x-request-id"]
    assert answer.text == own
    assert len(own) == 36
    (line,) = lines(server, "access_log.log", f"order-{chunked}")
    assert re.search(rf" 200 \d+ request_id={own} client_request_id=order-{chunked}$", line)


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
    server.wait_printed(text)


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
        server.wait_logged("ts_log.log", text)
        server.wait_printed(text)


def test_lines_about_a_worker_that_died(server):
    server.ask("lab", do="os._exit")
    number = server.worker("lab")["id"]
    for text in (
        "Worker disconnected. WORKER_MODEL_LOADED",
        "Backend worker error",
        f"Retry worker: {number} in 0 seconds.",
    ):
        server.wait_logged("ts_log.log", text)
    assert server.ask("lab", id=1).status_code == 200


def test_each_line_of_the_server_log_stands_there_once(server):
    log = server.log("ts_log.log").splitlines()
    assert sum("Model server started." in line for line in log) == 1
    records = [line for line in log if re.match(TIME, line)]
    assert len(records) == len(set(records))
    assert all(
        re.match(rf"{TIME} \[(INFO |WARN |ERROR|DEBUG)\] (main|W-\S+) ", line) for line in records
    )


def test_the_places_of_the_logs_can_be_chosen(prepare_server, tmp_path):
    places = {"LOG_LOCATION": str(tmp_path / "l"), "METRICS_LOCATION": str(tmp_path / "m")}
    with prepare_server(places) as server:
        server.start()
        server.stop()
        assert not (server.directory / "logs").exists()
    assert (tmp_path / "l" / "ts_log.log").stat().st_size
    assert (tmp_path / "m" / "ts_metrics.log").exists()


def test_levels_are_changed_while_the_server_runs(server):
    path = "/loggers/marserve"
    assert server.management("GET", path).json() == {"name": "marserve", "level": "info"}
    assert server.management("PUT", path, params={"level": "debug"}).json()["level"] == "debug"
    server.ask("lab", do="os._exit")
    server.wait_logged("ts_log.log", "[DEBUG]")
    assert server.management("PUT", path, params={"level": "info"}).status_code == 200
    assert server.management("PUT", path, params={"level": "loud"}).status_code == 400
    server.management("PUT", "/loggers/ACCESS_LOG", params={"level": "off"})
    server.predict("unseen")
    server.management("PUT", "/loggers/ACCESS_LOG", params={"level": "info"})
    server.predict("seen-again")
    server.wait_logged("access_log.log", "seen-again")
    assert {"name": "TS_METRICS", "level": "info"} in (
        server.management("GET", "/loggers").json()["loggers"]
    )


def test_the_last_lines_of_a_file_are_read_over_http(server):
    names = [f"unseen-{number}" for number in range(3)]
    for name in names:
        server.predict(name)
    server.wait_logged("access_log.log", names[-1])
    answer = server.management("GET", "/dashboard/log", params={"file": "access_log.log"}).json()
    assert {"ts_log.log", "model_log.log", "access_log.log"} <= set(answer["files"])
    shown = [line for line in answer["lines"] if "/unseen-" in line]
    assert all(name in line for name, line in zip(names, shown, strict=True))
    server.management("PUT", "/loggers/marserve", params={"level": "info"})
    first = server.management("GET", "/dashboard/log").json()
    assert first["file"] == "ts_log.log"
    assert any("Logger marserve was set to the level info." in line for line in first["lines"])
    for name in ("none.log", "../key_file.json", "../logs/ts_log.log"):
        answer = server.management("GET", "/dashboard/log", params={"file": name})
        assert answer.status_code == 404
    assert server.management("POST", "/dashboard/log").status_code == 405


@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_what_took_the_place_of_a_log_file_is_not_read(start_server, kind):
    with start_server() as server:
        path = server.directory / "logs" / "access_log.log"
        moved = path.rename(path.with_suffix(".1"))
        if kind == "pipe":
            os.mkfifo(path)
        else:
            path.symlink_to(server.directory / "config.properties")
        answer = server.management("GET", "/dashboard/log", params={"file": path.name}, timeout=20)
        assert answer.status_code == 404
        if kind == "pipe":
            server.terminate(signal.SIGHUP)
            server.wait_logged("ts_log.log", "SIGHUP: ")
        server.predict("unseen")
        server.wait_logged(moved.name, "/predictions/unseen")
        server.stop()


def test_a_directory_of_logs_that_was_removed_is_made_again_after_a_signal(start_server, wait_for):
    with start_server() as server:
        logs = server.directory / "logs"
        shutil.rmtree(logs)
        server.terminate(signal.SIGHUP)
        wait_for((logs / "ts_log.log").exists)
        server.wait_logged("ts_log.log", "SIGHUP: the log files were opened again.")
        server.predict("unseen")
        server.wait_logged("access_log.log", "/predictions/unseen")
        server.stop()


def test_levels_need_the_key_of_management(start_server):
    with start_server(disable_token_authorization="false") as server:
        keys = json.loads((server.directory / "key_file.json").read_text())
        for kind, status in (("inference", 400), ("management", 200)):
            token = {"Authorization": f"Bearer {keys[kind]['key']}"}
            answer = server.management("GET", "/loggers", headers=token)
            assert answer.status_code == status
        assert server.management("PUT", "/loggers/root?level=debug").status_code == 400


LOG4J = """
<Configuration>
  <Appenders>
    <Console name="STDOUT"><PatternLayout pattern="%m%n"/></Console>
    <RollingFile name="all" fileName="${env:LOG_LOCATION:-logs}/all.log"
        filePattern="${env:LOG_LOCATION:-logs}/all.%d{dd-MMM}.log.gz">
      <PatternLayout pattern="%d{ISO8601} |%-5p|%t|%c| %m%n"/>
      <Policies><TimeBasedTriggeringPolicy/></Policies>
    </RollingFile>
  </Appenders>
  <Loggers>
    <Logger name="org.pytorch.serve" level="warn"/>
    <Logger name="MODEL_METRICS" level="off"/>
    <Root level="info"><AppenderRef ref="STDOUT" level="error"/><AppenderRef ref="all"/></Root>
  </Loggers>
</Configuration>
"""


def test_a_log4j_file_is_followed(prepare_server):
    with prepare_server(vmargs="-Dlog4j.configurationFile=log4j2.xml") as server:
        (server.directory / "log4j2.xml").write_text(LOG4J)
        server.start()
        server.install(TALKATIVE, "talkative")
        server.predict("talkative")
        server.terminate()
        assert server.process.wait(20) == 0
        lines = server.log("all.log").splitlines()
        time = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d,\d{3} "
        assert all(
            re.match(time + r"\|(INFO |WARN |ERROR)\|[\w.-]+\|\w[\w.]+\| ", line) for line in lines
        )
        names = {line.split("|")[3] for line in lines}
        assert {"MODEL_LOG", "ACCESS_LOG", "TS_METRICS"} <= names
        assert "MODEL_METRICS" not in names
        assert not any("|INFO |" in line and "|marserve" in line for line in lines)
        server.wait_logged("all.log", 'POST /predictions/talkative HTTP/1.1" 200')
        assert not (server.directory / "logs" / "ts_log.log").exists()


DICTIONARY = """
version: 1
formatters:
  plain: {format: "%(name)s says %(message)s"}
handlers:
  file:
    class: marserve.frontend.logs.files.LogFile
    path: "$LOG_LOCATION/all.log"
    formatter: plain
  console: {class: logging.StreamHandler, formatter: plain}
loggers:
  marserve: {level: INFO}
  MODEL_LOG: {level: INFO, propagate: false, handlers: [file]}
root: {level: WARNING, handlers: [file, console]}
"""


def test_everything_from_a_dictionary(prepare_server):
    with prepare_server() as server:
        (server.directory / "logging.yaml").write_text(DICTIONARY)
        server.write_property("log_config", "logging.yaml")
        server.start()
        server.install(TALKATIVE, "talkative")
        server.predict("talkative")
        server.wait_logged("all.log", "MODEL_LOG says printed to stdout")
        server.stop()
        server.wait_logged("all.log", "says Model server started.")
        assert "printed to stdout" not in server.console_text()
        assert [path.name for path in (server.directory / "logs").glob("*.log")] == ["all.log"]


def test_a_log_configuration_that_cannot_be_used_stops_the_start(prepare_server):
    with prepare_server() as server:
        (server.directory / "logging.yaml").write_text("version: 3")
        process = server.launch("--log-config", "logging.yaml")
        assert process.wait(20) == 1
        server.wait_printed("logging.yaml")
        assert "Traceback" not in server.console_text()


def test_json_written_by_a_thread(prepare_server):
    with prepare_server(log_format="json", async_logging="true") as server:
        server.start()
        server.install(TALKATIVE, "talkative")
        server.predict("talkative")
        server.stop()
        for name in ("ts_log", "model_log", "access_log", "ts_metrics"):
            records = [json.loads(line) for line in server.log(f"{name}.log").splitlines()]
            assert records, name
        lines = [json.loads(line) for line in server.log("model_log.log").splitlines()]
        assert {"printed to stderr", "gr\u00fc\u00dfe"} <= {item["message"] for item in lines}
