"""Handlers that fail in every way there is: what their clients get, and what happens next."""

import contextlib
import re

import psutil
import pytest

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module", autouse=True)
def models(server, handlers):
    server.install(handlers / "lab.py", "lab", response_timeout=1)
    server.install(handlers / "lab.py", "batch", batch_size=3, max_batch_delay=60_000)


def error(answer):
    return answer.status_code, answer.json()["type"], answer.json()["message"]


@pytest.mark.parametrize(
    ("order", "status", "message"),
    [
        ({"do": "refuse", "message": "no tea", "code": 418}, 418, "no tea"),
        ({"do": "refuse", "message": "too large", "code": 413}, 507, "too large"),
        ({"do": "refuse", "message": "odd code", "code": 799}, 799, "odd code"),
        ({"do": "memory"}, 507, "Out of resources"),
        ({"do": "too few"}, 503, "number of batch response mismatched"),
        ({"do": "too many"}, 503, "number of batch response mismatched"),
        ({"do": "tuple"}, 503, "Invalid model predict output"),
        ({"do": "nothing"}, 503, "Invalid model predict output"),
        (
            {"do": "unserialisable", "answer": "object"},
            503,
            "Unsupported model output data type. prediction is of type object.",
        ),
    ],
)
def test_a_failure_that_is_reported(server, order, status, message):
    worker = server.worker("lab")["pid"]
    answer = server.ask("lab", **order)
    assert error(answer) == (status, "InternalServerException", message)
    assert list(answer.json()) == ["code", "type", "message"]
    assert answer.json()["code"] == status
    assert answer.headers["content-type"] == "application/json"
    assert server.ask("lab", id=1).json() == {"id": 1, "batch": 1}
    assert server.worker("lab")["pid"] == worker


def test_the_traceback_is_for_the_log_only(server):
    answer = server.ask("lab", do="raise")
    assert "secret" not in answer.text
    server.wait_logged("model_log.log", "ValueError: the secret of the handler")
    id_ = answer.headers["x-request-id"]
    server.wait_logged("model_log.log", f"Invoking custom service failed. Request ids: {id_}")
    assert error(answer) == (
        503,
        "InternalServerException",
        f"Prediction failed. The traceback is in model_log.log, with the request id {id_}.",
    )


def test_each_client_of_a_failed_batch_gets_the_id_of_its_own_request(server, together):
    answers = together([lambda: server.ask("batch", do="raise")] * 3)
    ids = {answer.headers["x-request-id"] for answer in answers}
    assert {answer.json()["message"].split()[-1].rstrip(".") for answer in answers} == ids
    server.wait_logged("model_log.log", min(ids))
    (line,) = [
        line
        for line in server.log("model_log.log").splitlines()
        if "Request ids: " in line and all(id_ in line for id_ in ids)
    ]
    assert "Invoking custom service failed." in line


def test_a_result_that_cannot_be_sent_speaks_for_itself(server, together):
    orders = [{"id": 1}, {"do": "unserialisable", "answer": "object"}, {"id": 3}]
    first, bad, last = together([lambda o=o: server.ask("batch", **o) for o in orders])
    assert (first.status_code, bad.status_code, last.status_code) == (200, 503, 200)


def test_a_handler_that_prints_garbage(server):
    assert server.ask("lab", do="garbage", id=1).json() == {"id": 1, "batch": 1}
    server.wait_logged("model_log.log", "the last of the garbage")
    log = server.log("model_log.log")
    assert r"binary \xff\xfe" in log
    assert r"binary \x80\x81 on stderr" in log
    assert "endlessendless" in log
    assert max(map(len, log.splitlines())) < 200_000
    assert server.worker("lab")["status"] == "READY"
    assert server.ask("lab", id=2).status_code == 200


@pytest.mark.parametrize(
    ("end", "how", "output"),
    [
        ("sys.exit", "ended with exit status 0", "SystemExit: 0"),
        ("os._exit", "ended with exit status 3", ""),
        ("segfault", "was killed by SIGSEGV", ""),
    ],
)
def test_a_handler_that_ends_its_process(server, wait_for, end, how, output):
    before = server.worker("lab")
    # It has two tries: the first may not have been its fault.
    message = f"Worker died. Its process {how}."
    assert error(server.ask("lab", do=end)) == (500, "InternalServerException", message)
    assert server.worker("lab")["lastError"] == f"Worker disconnected. Its process {how}."
    failure = wait_for(lambda: (worker := server.worker("lab")).get("lastErrorOutput") and worker)
    assert before["startTime"] < failure["lastErrorTime"]
    assert "handle" in "".join(failure.get("lastErrorStack", ["handle"]))
    assert (end == "segfault") == ("lastErrorStack" in failure)
    assert output in "\n".join(failure["lastErrorOutput"])
    server.wait_logged("ts_log.log", f"Its process {how}.")
    # The next request waits for the restart, one second later.
    assert server.ask("lab", id=1).json() == {"id": 1, "batch": 1}
    after = server.worker("lab")
    assert (after["status"], after["lastError"]) == ("READY", failure["lastError"])
    assert after["pid"] != before["pid"]
    assert after["id"] == before["id"]
    assert server.inference("GET", "/ping").status_code == 200


def test_a_worker_killed_in_the_middle_of_a_batch(server, background, gate, wait_for):
    pid = server.worker("batch")["pid"]
    orders = [{"gate": gate.path}, {"id": 2}, {"id": 3}]
    batch = [background(server.ask, "batch", **order) for order in orders]
    gate.wait_entered()
    behind = [background(server.ask, "batch", id=i) for i in range(3)]
    server.wait_queued("batch", 3)
    psutil.Process(pid).kill()
    wait_for(lambda: not psutil.pid_exists(pid))
    gate.open_for_all()  # the one that stood there stands there again
    assert [answer.result().json()["batch"] for answer in batch] == [1, 1, 1]
    assert [answer.result().json()["batch"] for answer in behind] == [3, 3, 3]
    assert server.worker("batch")["pid"] != pid
    server.wait_logged("ts_log.log", "Worker disconnected. WORKER_MODEL_LOADED")
    wait_for(lambda: re.search(r"Retry worker: \d+ in [01] seconds\.", server.log("ts_log.log")))


def test_an_idle_worker_that_is_killed_is_replaced(server, wait_for):
    pid = server.worker("lab")["pid"]
    psutil.Process(pid).kill()
    wait_for(lambda: server.worker("lab")["pid"] not in (pid, -1))
    server.wait_workers("lab", "READY")


def test_a_hung_handler_is_killed_after_its_response_timeout(server, wait_for):
    pid = server.worker("lab")["pid"]
    cause = "Timeout: no answer within responseTimeout (1 s)."
    answer = server.ask("lab", do="hang")
    assert error(answer) == (500, "InternalServerException", f"Worker died. {cause}")
    wait_for(lambda: not psutil.pid_exists(pid))
    failure = wait_for(lambda: (worker := server.worker("lab")).get("lastErrorStack") and worker)
    assert failure["lastError"] == f"Backend worker did not respond in given time. {cause}"
    assert "in _hang" in "\n".join(failure["lastErrorStack"])
    server.wait_logged("ts_log.log", "Backend worker did not respond in given time")
    lines = [line.partition(" - ")[2] or line for line in server.log("ts_log.log").splitlines()]
    place = lines.index("Backend worker error")
    assert lines[place - 1] == "Number or consecutive unsuccessful inference 1"
    assert lines[place + 1] == (
        "org.pytorch.serve.wlm.WorkerInitializationException: "
        "Backend worker did not respond in given time"
    )
    server.wait_workers("lab", "READY")
    server.wait_logged("ts_log.log", "Auto recovery succeeded, reset recoveryStartTS\n")
    log = server.log("ts_log.log")
    assert re.search(r"Auto recovery start timestamp: \d{13}\n", log)
    assert server.ask("lab", id=1).status_code == 200


def is_alive(pid):
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def test_the_children_of_a_killed_worker_die_with_it(server, wait_for):
    left = server.ask("lab", do="child").json()
    assert is_alive(left["child"])
    psutil.Process(left["worker"]).kill()
    wait_for(lambda: not is_alive(left["child"]))
    server.wait_workers("lab", "READY")


def test_the_children_of_a_stopped_worker_die_with_it(server, handlers, wait_for):
    server.install(handlers / "lab.py", "parent")
    left = server.ask("parent", do="child").json()
    assert server.management("DELETE", "/models/parent").status_code == 200
    assert not is_alive(left["worker"])
    wait_for(lambda: not is_alive(left["child"]))


def test_past_the_retry_window_a_worker_is_given_up(server, handlers):
    server.install(handlers / "lab.py", "brief", "maxRetryTimeoutInSec: 0\n")
    assert server.ask("brief", do="os._exit").status_code == 500
    server.wait_logged("ts_log.log", "given up")
    refused = server.ask("brief", id=1)
    assert error(refused)[:2] == (503, "ServiceUnavailableException")
    ping = server.inference("GET", "/ping")
    assert (ping.status_code, ping.json()) == (500, {"status": "Unhealthy"})
    assert server.management("DELETE", "/models/brief").status_code == 200
    assert server.inference("GET", "/ping").status_code == 200


def test_what_waits_when_the_last_worker_is_given_up_is_answered(
    server, handlers, background, gate
):
    server.install(handlers / "lab.py", "brief", "maxRetryTimeoutInSec: 0\n")
    first = background(server.ask, "brief", gate=gate.path, do="os._exit")
    gate.wait_entered()
    behind = background(server.ask, "brief", id=2)
    server.wait_queued("brief", 1)
    gate.open()
    died = "Its process ended with exit status 3."
    assert error(first.result())[2] == f"Worker died. {died}"
    assert error(behind.result())[:2] == (503, "ServiceUnavailableException")
    assert error(behind.result())[2].endswith(f"Its worker has failed: Worker disconnected. {died}")
    assert server.management("DELETE", "/models/brief").status_code == 200


@pytest.mark.parametrize("slip", ["context.metrics = None", "context.stopping_criteria = 5"])
def test_what_a_handler_does_to_its_context_ends_no_worker(server, slip):
    source = f"def handle(data, context):\n    {slip}\n    return data and ['x'] * len(data)\n"
    name = f"slip{len(slip)}"
    server.install(source, name)
    pid = server.worker(name)["pid"]
    assert server.predict(name).status_code in (200, 503)
    assert server.worker(name)["pid"] == pid
