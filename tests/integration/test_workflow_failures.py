"""Workflows when things go wrong: every run is answered once, and nothing is left over."""

import contextlib
import io
import json
import os
import signal
import tarfile
import zipfile

import pytest
import requests

pytestmark = pytest.mark.integration

FORK = "noted: [gated, fails_when_told], gated: [tell], fails_when_told: [tell]"


@pytest.fixture(scope="module")
def functions(handlers):
    return (handlers / "functions.py").read_text()


@pytest.fixture
def install(install_workflow, functions):
    def make(dag, models=""):
        text = f"models: {{retry-attempts: 0, {models}}}\ndag: {{{dag}}}\n"
        return install_workflow(text, functions)

    return make


@pytest.fixture
def is_idle(server, wait_for):
    """Nothing of a workflow is under way any more: no run, no job, no worker that is busy."""

    def check(name, nodes):
        def pending():
            queues = [server.describe(f"{name}__{node}")["jobQueueStatus"] for node in nodes]
            waiting = sum(queue["pendingRequests"] for queue in queues)
            opened = server.metrics("marserve_open_requests")
            held = sum(value for series, value in opened.items() if f"{name}__" in series)
            return waiting + held + server.workflow(name)["runs"]["underWay"]

        wait_for(lambda: pending() == 0, what=pending)

    return check


def last_nodes(server, name):
    return {node["node"]: node for node in server.runs(name)[-1]["nodes"]}


def test_a_failing_branch_cancels_its_siblings(
    install, server, background, make_gate, is_idle, wait_for
):
    name = install(FORK)
    slow, failing, blocking = make_gate(), make_gate(), make_gate()
    blocked = background(
        server.inference, "POST", f"/predictions/{name}__gated", json={"gate": blocking.path}
    )
    blocking.wait_entered()  # so the sibling will be queued behind it
    orders = {"gate": slow.path, "failing": failing.path}
    answer = background(server.inference, "POST", f"/wfpredict/{name}", json=orders)
    server.wait_queued(f"{name}__gated", 1)
    failing.open()
    assert answer.result(20).json()["message"] == "Error executing fails_when_told"
    server.wait_queued(f"{name}__gated", 0)  # its place is free
    nodes = last_nodes(server, name)
    assert nodes["gated"]["outcome"] == "cancelled"
    assert nodes["fails_when_told"]["outcome"] == "failed"
    assert "startedMs" not in nodes["gated"]
    blocking.open()
    assert blocked.result(20).status_code == 200
    is_idle(name, ("noted", "gated", "fails_when_told", "tell"))


FAILS_TWICE = """
COUNT = []

def handle(data, context):
    COUNT.extend([1] if data else [])
    if data and len(COUNT) <= 2:
        raise RuntimeError(f"a batch of {len(data)}")
    return data and ["x"] * len(data)
"""


def test_runs_of_a_batch_that_fails_are_all_tried_again_and_answered(
    server, install_workflow, make_archive, together
):
    """Runs that had the same error ended each other: their clients got no answer."""
    make_archive(server.store, FAILS_TWICE, "fails_twice", "isolateFailures: false\n")
    models = "retry-attempts: 3, batch-size: 4, max-batch-delay: 500, n: {url: fails_twice.mar}"
    name = install_workflow(f"models: {{{models}}}\ndag: {{n: []}}\n")
    answers = together([lambda: server.inference("POST", f"/wfpredict/{name}", data=b"x")] * 4)
    assert [answer.text for answer in answers] == ["x"] * 4


def test_a_client_that_leaves_takes_its_run_along(
    install, server, background, make_gate, is_idle, wait_for, record
):
    name = install("gated: [noted]")
    gate, blocking = make_gate(), make_gate()
    first = background(server.inference, "POST", f"/wfpredict/{name}", json={"gate": blocking.path})
    blocking.wait_entered()
    body = json.dumps({"gate": gate.path, "record": str(record)}).encode()
    with server.connect("inference") as client:
        head = f"POST /wfpredict/{name} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        server.wait_queued(f"{name}__gated", 1)
    server.wait_queued(f"{name}__gated", 0)
    wait_for(lambda: server.workflow(name)["runs"]["underWay"] == 1)
    assert server.runs(name)[-1]["outcome"] == "cancelled"
    blocking.open()
    assert first.result(20).status_code == 200
    assert record.read_text() == ""
    is_idle(name, ("gated", "noted"))


def test_a_client_that_leaves_while_a_node_runs_leaves_nothing(
    install, server, gate, is_idle, record
):
    name = install("gated: [noted]")
    body = json.dumps({"gate": gate.path, "record": str(record)}).encode()
    with server.connect("inference") as client:
        head = f"POST /wfpredict/{name} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        gate.wait_entered()
    gate.open()
    is_idle(name, ("gated", "noted"))
    assert record.read_text().split() == ["gated"]
    assert server.runs(name)[-1]["outcome"] == "cancelled"


def test_an_expired_deadline_ends_the_whole(install, server, gate, is_idle, record):
    name = install("noted: [gated], gated: [again]")
    orders = {"gate": gate.path, "record": str(record)}
    answer = server.inference(
        "POST", f"/wfpredict/{name}", json=orders, headers={"X-Timeout-Ms": "300"}
    )
    assert answer.status_code == 504
    assert answer.json()["message"] == "No answer within X-Timeout-Ms=300."
    assert server.runs(name)[-1]["outcome"] == "expired"
    assert last_nodes(server, name)["gated"]["outcome"] == "expired"
    gate.open()
    is_idle(name, ("noted", "gated", "again"))
    assert "again" not in last_nodes(server, name)
    answer = server.inference("POST", f"/wfpredict/{name}", json={}, headers={"X-Timeout-Ms": "x"})
    assert answer.status_code == 400


def test_a_worker_that_is_killed_in_the_middle_is_replaced_and_the_run_answered(
    install, server, background, gate, is_idle, record
):
    name = install("noted: [gated], gated: [again]")
    orders = {"gate": gate.path, "record": str(record)}
    answer = background(server.inference, "POST", f"/wfpredict/{name}", json=orders)
    gate.wait_entered()
    os.kill(server.worker(f"{name}__gated")["pid"], signal.SIGKILL)
    gate.open_for_all()
    assert answer.result(20).json() == orders
    assert record.read_text().split() == ["noted", "gated", "gated"]
    is_idle(name, ("noted", "gated", "again"))


def test_a_node_whose_process_ends_at_its_first_call_is_answered(install, server, record):
    name = install("first_dies: []")
    answer = server.inference("POST", f"/wfpredict/{name}", json={"record": str(record)})
    assert answer.json() == {}
    assert len(server.runs(name)) == 1


COUNTER = """
import os


class Counter:
    def initialize(self, context):
        self.seen = {}

    def handle(self, data, context):
        sequence = context.get_sequence_id(0)
        self.seen[sequence] = self.seen.get(sequence, 0) + 1
        if data[0]["body"] == b"raise":
            raise ValueError("after it was counted")
        if data[0]["body"] == b"die":
            os._exit(1)
        return [self.seen[sequence]]
"""
STATEFUL = """
batchSize: 1
sequenceBatching: true
sequenceMaxIdleMSec: 60000
"""


def test_a_stateful_node_is_not_asked_twice_for_one_request(server, install_workflow, make_archive):
    make_archive(server.store, COUNTER, "counter", STATEFUL)
    name = install_workflow("models: {c: {url: counter.mar, retry-attempts: 3}}\ndag: {c: []}\n")

    def ask(body):
        headers = {"ts_request_sequence_id": "a"}
        return server.inference("POST", f"/wfpredict/{name}", data=body, headers=headers)

    assert ask(b"1").json() == 1
    failed = ask(b"raise")
    assert (failed.status_code, failed.json()["node"]) == (500, "c")
    assert ask(b"1").json() == 3
    lost = ask(b"die")
    assert lost.status_code == 409
    assert "Worker died" in lost.json()["message"]
    assert [run["nodes"][0]["attempts"] for run in server.runs(name)] == [1, 1, 1, 1]


def test_no_more_runs_than_allowed(start_server, make_workflow, functions, background, make_gate):
    with start_server(max_workflow_runs="2") as server:
        make_workflow(server.store, "few", "models: {}\ndag: {gated: []}", functions)
        server.management("POST", "/workflows?url=few.war")
        gates = [make_gate(), make_gate()]
        answers = []
        for gate in gates:
            answers.append(
                background(server.inference, "POST", "/wfpredict/few", json={"gate": gate.path})
            )
            gates[0].wait_entered()
        server.wait_queued("few__gated", 1)
        assert server.workflow("few")["runs"] == {"underWay": 2, "most": 2}
        answer = server.inference("POST", "/wfpredict/few", json={})
        assert (answer.status_code, answer.json()["type"]) == (503, "ServiceUnavailableException")
        assert "(max_workflow_runs)" in answer.json()["message"]
        head = b"POST /wfpredict/few HTTP/1.1\r\nhost: x\r\ncontent-length: 5000000\r\n\r\n"
        unread = server.exchange("inference", head, b"(max_workflow_runs)")
        assert unread.startswith(b"HTTP/1.1 503 ")
        large, small = server.management("GET", "/requests?failed=5&model=few").json()["requests"]
        assert small["id"] == answer.headers["x-request-id"]
        for line in (large, small):
            assert (line["outcome"], line["status"]) == ("refused", 503)
            assert line["explanation"] == answer.json()["message"]
        for gate in gates:
            gate.open_for_all()
        assert [answer.result(20).status_code for answer in answers] == [200, 200]
        counted = server.metrics("marserve_workflow_runs_total")
        assert sum(value for series, value in counted.items() if "refused" in series) == 2


def test_runs_are_bounded_by_the_shortest_queue_of_the_nodes(
    start_server, make_workflow, functions
):
    with start_server(job_queue_size="7") as server:
        make_workflow(server.store, "short", "models: {}\ndag: {text: []}", functions)
        server.management("POST", "/workflows?url=short.war")
        assert server.workflow("short")["runs"]["most"] == 7


def test_a_full_queue_of_a_node_is_told_as_busy(
    start_server, make_workflow, functions, background, make_gate
):
    with start_server(job_queue_size="1", max_workflow_runs="9") as server:
        make_workflow(server.store, "full", "models: {}\ndag: {gated: []}", functions)
        server.management("POST", "/workflows?url=full.war")
        gates = [make_gate(), make_gate()]
        answers = [
            background(server.inference, "POST", "/wfpredict/full", json={"gate": gates[0].path})
        ]
        gates[0].wait_entered()
        answers.append(
            background(server.inference, "POST", "/wfpredict/full", json={"gate": gates[1].path})
        )
        server.wait_queued("full__gated", 1)
        answer = server.inference("POST", "/wfpredict/full", json={})
        assert (answer.status_code, answer.json()["type"]) == (503, "ServiceUnavailableException")
        for gate in gates:
            gate.open()
        assert [answer.result(20).status_code for answer in answers] == [200, 200]


def test_what_runs_is_finished_before_a_workflow_is_unregistered(
    install, server, background, gate, wait_for
):
    name = install("gated: [again]")
    answer = background(server.inference, "POST", f"/wfpredict/{name}", json={"gate": gate.path})
    gate.wait_entered()
    gone = background(server.management, "DELETE", f"/workflows/{name}")
    wait_for(lambda: server.management("GET", f"/workflows/{name}").status_code == 404)
    assert server.inference("POST", f"/wfpredict/{name}", json={}).status_code == 404
    again = background(server.management, "POST", f"/workflows?url={name}.war")
    gate.open()
    assert answer.result(20).status_code == 200
    assert gone.result(20).status_code == 200
    assert again.result(20).status_code == 200  # it has waited for the nodes to be gone
    assert server.inference("POST", f"/wfpredict/{name}", json={}).status_code == 200


def test_a_run_between_two_nodes_is_finished_when_the_server_stops(
    start_server, make_workflow, functions, background, gate
):
    with start_server() as server:
        make_workflow(server.store, "last", "models: {}\ndag: {gated: [again]}", functions)
        server.management("POST", "/workflows?url=last.war")
        answer = background(server.inference, "POST", "/wfpredict/last", json={"gate": gate.path})
        gate.wait_entered()
        server.terminate()
        server.wait_logged("ts_log.log", "Stopping; accepted requests")
        gate.open()
        assert answer.result(20).json() == {"gate": gate.path}
        server.wait_stopped()
        server.assert_nothing_left()


def test_a_server_that_stops_while_a_workflow_loads_leaves_nothing(
    start_server, make_workflow, background, gate
):
    handler = f"def slow(data, context):\n    open({gate.path!r}).read()\n"
    with start_server(drain_timeout="0") as server:
        make_workflow(server.store, "coming", "models: {}\ndag: {slow: []}", handler)
        answer = background(server.management, "POST", "/workflows?url=coming.war")
        gate.wait_entered()
        server.terminate()
        gate.open_for_all()
        with contextlib.suppress(requests.RequestException):  # its connection may be gone before
            assert answer.result(20).status_code == 503
        server.wait_stopped()
        server.assert_nothing_left()


# -- archives that lie -----------------------------------------------------------------------------

MANIFEST = {
    "createdOn": "01/01/2026 00:00:00",
    "workflow": {"workflowName": "liar", "specFile": "spec.yaml", "handler": "h.py"},
    "archiverVersion": "1",
}
GOOD = "models: {}\ndag: {pre: []}\n"
H = "def pre(data, context):\n    return data and ['{}'] * len(data)\n"


def zipped(spec=GOOD, manifest=None, **files):
    text = json.dumps(MANIFEST if manifest is None else manifest)
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("WAR-INF/MANIFEST.json", text)
        for name, content in {"spec.yaml": spec, "h.py": H, **files}.items():
            archive.writestr(name, content)
    return data.getvalue()


def without(key, of_workflow=False):
    if of_workflow:
        workflow = {name: each for name, each in MANIFEST["workflow"].items() if name != key}
        return {**MANIFEST, "workflow": workflow}
    return {name: each for name, each in MANIFEST.items() if name != key}


def tarred():
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as archive:
        members = {"WAR-INF/MANIFEST.json": json.dumps(MANIFEST), "spec.yaml": GOOD, "h.py": H}
        for name, text in members.items():
            info = tarfile.TarInfo(f"liar/{name}")
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
    return data.getvalue()


BOMB = "models: {}\n" + "\n".join(
    [f"a0: &a0 [{', '.join(['x'] * 9)}]"]
    + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
)
MANY = "models: {}\ndag: {pre: [" + ", ".join(f"n{number}" for number in range(10_000)) + "]}"
LONG = "models: {}\ndag: {pre: [" + ", ".join(f"node{number:08}" for number in range(40_000)) + "]}"
WORKFLOW = MANIFEST["workflow"]


@pytest.mark.parametrize(
    ("archive", "message"),
    [
        (zipped(manifest=without("workflow")), "Missing Workflow entry in manifest file."),
        (zipped(manifest=without("createdOn")), "Workflow archive createdOn is not defined."),
        (zipped(manifest=without("archiverVersion")), "Workflow archive version is not defined."),
        (zipped(manifest=without("workflowName", True)), "Workflow name is not defined."),
        (zipped(manifest=without("specFile", True)), "Workflow specification file is not defined."),
        (
            zipped(manifest=without("handler", True)),
            "pre is not in models, so it must be a function; but",
        ),
        (zipped(manifest=[]), "Failed to parse signature.json."),
        (zipped(manifest={"workflow": 1}), "Manifest field workflow must be an object."),
        (
            zipped(manifest={**MANIFEST, "workflow": {**WORKFLOW, "specFile": "../../x"}}),
            "The manifest points outside the archive: ../../x",
        ),
        (
            zipped(manifest={**MANIFEST, "workflow": {**WORKFLOW, "handler": "/etc/passwd"}}),
            "The manifest points outside the archive: /etc/passwd",
        ),
        (
            zipped(manifest={**MANIFEST, "workflow": {**WORKFLOW, "specFile": "gone.yaml"}}),
            "gone.yaml is not in the archive.",
        ),
        (
            zipped(manifest={**MANIFEST, "workflow": {**WORKFLOW, "specFile": "WAR-INF"}}),
            "WAR-INF is no file.",
        ),
        (
            zipped(manifest={**MANIFEST, "workflow": {**WORKFLOW, "handler": "gone.py"}}),
            "the handler file gone.py is not in the archive.",
        ),
        (
            zipped(manifest={**MANIFEST, "workflow": {**WORKFLOW, "workflowName": "a/b"}}),
            "Workflow name must not contain a slash.",
        ),
        (zipped("models: {\n"), "Failed to parse yaml."),
        (zipped("\0"), "Failed to parse yaml."),
        (zipped("!!python/object/apply:os.system [id]"), "Failed to parse yaml."),
        (zipped(BOMB), "spec.yaml expands to more than 100000 values."),
        (zipped("a: &a [*a]"), "spec.yaml has an alias within what it names."),
        (zipped("#" * (1 << 20) + GOOD), "spec.yaml is longer than 1048576 bytes."),
        (zipped("{1: 2}"), "has a name that is not a text"),
        (zipped("{models: 2020-01-01}"), "holds a value of no use there"),
        (zipped(MANY), "The workflow has more than 100 nodes."),
        (zipped(LONG), "Manifest and settings of the archive exceed"),
        (zipped("models: {}\ndag: {pre: [pre]}"), "Self loop exception"),
        (zipped("models: {}\ndag: {s: [a], a: [b], b: [a]}"), "Not a valid DAG"),
        (zipped(**{"../evil.py": "x"}), "Detected Zip Slip vulnerability: ../evil.py"),
        (zipped()[:-30], "is not a readable zip archive"),
        (b"", "is not a readable zip archive"),
    ],
    # An archive has its time in it, and processes of pytest-xdist compare the names of tests.
    ids=lambda value: value if isinstance(value, str) else "archive",
)
def test_an_archive_that_lies_is_refused_and_leaves_nothing(server, archive, message):
    (server.store / "liar.war").write_bytes(archive)
    answer = server.management("POST", "/workflows?url=liar.war")
    assert answer.status_code == 400
    assert message in answer.json()["message"]
    assert server.unpacked_workflows() == set()
    assert not server.is_known("liar__pre")
    assert server.inference("GET", "/ping").status_code == 200


@pytest.mark.parametrize("name", ["liar.tar.gz", "liar.war"])
def test_a_workflow_in_a_tar_is_taken_under_any_name(server, name):
    (server.store / name).write_bytes(tarred())
    assert server.management("POST", f"/workflows?url={name}").status_code == 200
    assert server.inference("POST", "/wfpredict/liar").text == "{}"
    server.management("DELETE", "/workflows/liar")
    assert server.unpacked_workflows() == set()
