"""A client's list in one request: its items travel by themselves and come back as one answer."""

import json
import time

import pytest

pytestmark = pytest.mark.integration

NEVER = 60_000  # ms: a window that no test waits for
LISTS = "dynamicBatchSize: true\n"
JSON = "application/json"
SHOW = """
def handle(data, context):
    if data is None:
        return None
    rows = [row.get("data") or row.get("body") for row in data]
    said = [row.decode() if isinstance(row, (bytes, bytearray)) else row for row in rows]
    ask = context.get_request_header
    return [
        {
            "row": row,
            "batch": len(data),
            "id": context.get_request_id(place),
            "explain": ask(place, "explain"),
            "fields": sorted(data[place]),
            "type": ask(place, "body"),
        }
        for place, row in enumerate(said)
    ]
"""

HOLD = """
from pathlib import Path

class Handler:
    def initialize(self, context):
        pass

    def handle(self, data, context):
        if isinstance(data[0]["body"], bytearray):
            return [Path(data[0]["body"].decode()).read_text()]
        return show(data, context)
"""


@pytest.fixture
def install(install):
    """Install a handler, by default the lab, for lists."""

    def make(config="", **query):
        return install(LISTS + config, **{"batch_size": 4, "max_batch_delay": 0, **query})

    return make


def rows_of(answer):
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == JSON
    assert answer.text == json.dumps(answer.json(), indent=2)
    return answer.json()


# -- order and packing -----------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize(
    ("config", "query"),
    [
        ("", {"batch_size": 1}),
        ("", {"batch_size": 4}),
        ("", {"batch_size": 7, "max_batch_delay": 5}),
        ("", {"batch_size": 8, "batch_policy": "greedy"}),
        ("", {"batch_size": 8, "batch_policy": "adaptive"}),
        ("", {"batch_size": 4, "batch_policy": "fixed_or_single"}),
        ("compiledBatchSizes: [1, 4, 8]\n", {"batch_size": 8}),
    ],
    ids=lambda value: str(value),
)
def test_answers_come_in_the_order_of_the_items(server, install, workers, config, query):
    name = install(config, handler=SHOW, initial_workers=workers, **query)
    for length in [*range(10), 16, 23, 30]:
        items = [[number, {"of": length}] for number in range(length)]
        rows = rows_of(server.predict(name, json=items))
        assert [row["row"] for row in rows] == items
        assert all(row["batch"] <= query["batch_size"] for row in rows)


def test_a_long_list_is_cut_into_full_batches(server, install):
    rows = rows_of(server.predict(install(handler=SHOW), json=[*range(1, 11)]))
    assert [row["batch"] for row in rows] == [4] * 8 + [2] * 2


def test_a_long_list_is_spread_over_workers(server, install, background, make_gate):
    name = install(initial_workers=2, batch_size=1)
    gates = [make_gate(), make_gate()]
    items = [{"id": place, "gate": gate.path} for place, gate in enumerate(gates)]
    answer = background(server.predict, name, json=items)
    for gate in gates:
        gate.wait_entered()
    for gate in reversed(gates):
        gate.open()
    assert [row["id"] for row in rows_of(answer.result())] == [0, 1]


def test_short_lists_of_several_clients_share_a_batch(server, install, background, gate):
    name = install(handler=HOLD + SHOW.replace("def handle", "def show"))
    ahead = background(server.predict, name, data=gate.path)
    gate.wait_entered()
    lists = [["a", "b"], ["c"], ["d"]]
    answers = []
    for waiting, items in zip((2, 3, 4), lists, strict=True):
        answers.append(background(server.predict, name, json=items))
        server.wait_queued(name, waiting)
    gate.open()
    assert ahead.result().status_code == 200
    for items, answer in zip(lists, answers, strict=True):
        rows = rows_of(answer.result())
        assert [(row["row"], row["batch"]) for row in rows] == [(i, 4) for i in items]


def test_a_list_does_not_wait_for_a_window(server, install, background):
    name = install(handler=SHOW, max_batch_delay=NEVER)
    rows = rows_of(server.predict(name, json=["a", "b", "c"]))
    assert [row["batch"] for row in rows] == [3] * 3
    rows = rows_of(server.predict(name, json=[*range(1, 8)]))
    assert [row["batch"] for row in rows] == [4] * 4 + [3] * 3
    batches = server.management("GET", f"/models/{name}/batches").json()["batches"]
    assert [batch["reason"] for batch in batches] == ["list", "full", "list"]
    # A single request does, as does a list of one; the next list takes it along.
    alone = background(server.predict, name, data=b"alone")
    server.wait_queued(name, 1)
    rows = rows_of(server.predict(name, json=["a", "b"]))
    assert [row["batch"] for row in rows] == [3] * 2
    assert alone.result().json()["batch"] == 3
    one = background(server.predict, name, json=["one"])
    server.wait_queued(name, 1)
    assert rows_of(server.predict(name, json=["a", "b"]))
    assert rows_of(one.result())[0]["batch"] == 3


def test_a_row_counts_in_batches_and_the_list_as_one_request(server, install):
    name = install(handler=SHOW)
    rows_of(server.predict(name, json=[*range(1, 7)]))

    def counted(metric):
        samples = server.metrics(metric)
        return [count for series, count in samples.items() if f'"{name}"' in series]

    assert counted("ts_inference_requests_total") == [1]
    assert counted("marserve_batch_size_sum") == [6]
    assert counted("marserve_batch_size_count") == [2]


# -- what a list is --------------------------------------------------------------------------------


def test_rows_have_ids_of_their_own(server, install):
    answer = server.predict(install(handler=SHOW), json=["a", "b", "c"])
    own = answer.headers["x-request-id"]
    assert [row["id"] for row in rows_of(answer)] == [f"{own}.{number}" for number in range(3)]


@pytest.mark.parametrize(
    ("path", "member", "explain"),
    [
        ("/predictions/{}", "predictions", "False"),
        ("/v1/models/{}:predict", "predictions", "False"),
        ("/v1/models/{}:explain", "explanations", "True"),
        ("/explanations/{}/1.0", "explanations", "True"),
    ],
)
def test_instances_are_answered_as_kserve_does(server, install, path, member, explain):
    name = install(handler=SHOW)
    document = {"instances": [{"x": 1}, {"x": 2}]}
    answer = server.inference("POST", path.format(name), json=document)
    assert [*answer.json()] == [member]
    rows = answer.json()[member]
    assert [(row["row"], row["explain"]) for row in rows] == [
        ({"x": 1}, explain),
        ({"x": 2}, explain),
    ]


def test_files_are_a_row_each(server, install):
    name = install(handler=SHOW)
    files = [
        ("data", ("a.png", b"first", "image/png")),
        ("data", ("b.json", b'{"second": 2}', JSON)),
        ("more", ("c.txt", b"third", "text/plain")),
        ("data", ("d", b"fourth")),
    ]
    rows = rows_of(server.predict(name, files=files, data={"threshold": "0.5"}))
    assert [row["row"] for row in rows] == ["first", {"second": 2}, "third", "fourth"]
    assert [row["type"]["content-type"] for row in rows] == [
        "image/png", JSON, "text/plain", "application/octet-stream"
    ]  # fmt: skip
    assert {(*row["fields"],) for row in rows} == {("body", "threshold")}


@pytest.mark.parametrize(
    "sent",
    [
        {"data": b"\xff\xd8image", "headers": {"Content-Type": "image/jpeg"}},
        {"data": b"[1, 2", "headers": {"Content-Type": JSON}},
        {"data": b"[1, 2]", "headers": {"Content-Type": "text/plain"}},
        {"json": {"instances": "no list"}},
        {"json": "text"},
        {"files": {"data": ("a", b"alone")}},
    ],
    ids=repr,
)
def test_what_is_no_list_is_answered_as_ever(server, install, sent):
    source = "def handle(data, context):\n    return [str(row) for row in data or []]\n"
    name = install(handler=source)
    server.install(source, f"{name}-plain")
    answers = [server.predict(model, **sent) for model in (name, f"{name}-plain")]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[0].text == answers[1].text
    assert "content-type" not in answers[0].headers


def test_without_the_option_a_list_is_one_request(server, install):
    name = install()
    server.install(SHOW, f"{name}-plain")
    assert server.predict(f"{name}-plain", json=[1, 2]).json()["row"] == [1, 2]


@pytest.mark.parametrize("envelope", ["kserve", "json"])
def test_rows_of_instances_suit_an_envelope(start_server, envelope):
    source = "def handle(rows, context):\n    return [[len(rows), row] for row in rows or []]\n"
    with start_server(service_envelope=envelope) as server:
        server.install(source, "m", LISTS, batch_size=2, max_batch_delay=0)
        answer = server.predict("m", json={"instances": ["a", "b", "c"]})
        assert answer.json() == {"predictions": [[2, "a"], [2, "b"], [1, "c"]]}


# -- when it goes wrong ----------------------------------------------------------------------------


def test_an_item_that_is_refused_speaks_for_the_list(server, install, background, gate, record):
    name = install(batch_size=1)
    seen = {"record": str(record)}
    bad = {"id": "bad", "status": [400, "Bad"], "answer": "no image", "gate": gate.path, **seen}
    items = [{"id": "good", **seen}, bad, *({"id": f"later-{i}", **seen} for i in range(5))]
    answer = background(server.predict, name, json=items)
    gate.wait_entered()
    server.wait_queued(name, 5)
    gate.open()
    assert (answer.result().status_code, answer.result().text) == (400, "no image")
    assert answer.result().headers["x-failed-item"] == "1"
    server.wait_queued(name, 0)
    assert server.ask(name).status_code == 200
    # One was in the worker before anybody could know; the others never got there.
    assert record.read_text().split() in (["good", "bad"], ["good", "bad", "later-0"])


@pytest.mark.parametrize("isolates", ["true", "false"])
def test_an_item_that_makes_the_handler_raise_speaks_for_the_list(server, install, isolates):
    name = install(f"isolateFailures: {isolates}\n")
    answer = server.predict(name, json=[{}, {}, {"do": "raise"}, {}, {}])
    assert answer.status_code == 503
    assert answer.json()["message"].startswith("Prediction failed. ")
    assert answer.json()["message"].endswith(f" {answer.headers['x-request-id']}.")
    assert len(rows_of(server.predict(name, json=[{}, {}]))) == 2


def test_a_client_that_leaves_takes_all_of_its_list_with_it(server, install, gate, record):
    name = install(batch_size=1)
    items = [{"gate": gate.path}, *({"id": i, "record": str(record)} for i in range(5))]
    body = json.dumps(items).encode()
    with server.connect("inference") as connection:
        connection.sendall(
            b"POST /predictions/%b HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (name.encode(), len(body), body)
        )
        gate.wait_entered()
        server.wait_queued(name, 5)
    server.wait_queued(name, 0)
    gate.open()
    assert server.ask(name).status_code == 200
    assert record.read_text() == ""


def test_a_list_expires_as_one(server, install, background, gate, record):
    name = install(batch_size=1)
    items = [{"gate": gate.path}, *({"id": i, "record": str(record)} for i in range(5))]
    began = time.monotonic()
    answer = server.predict(name, json=items, headers={"X-Timeout-Ms": "300"})
    assert 0.3 <= time.monotonic() - began < 2.3
    assert (answer.status_code, answer.json()["type"]) == (504, "RequestTimeoutException")
    server.wait_queued(name, 0)
    gate.open()
    assert server.ask(name).status_code == 200
    assert record.read_text() == ""


def test_a_list_beyond_the_capacity_runs_in_compiled_sizes(server, install):
    name = install(batch_size=8, compiled_batch_sizes="1,4,8", max_batch_delay=0)
    answer = server.predict(name, json=[{"n": number} for number in range(1024)])
    assert (answer.status_code, len(answer.json())) == (200, 1024)
    batches = server.management("GET", f"/models/{name}/batches").json()["batches"]
    assert {batch["size"] for batch in batches} == {8}


def test_millions_of_items_hold_nobody_up(server, install):
    name = install()
    body = b"[" + b"1," * 3_000_000 + b"1]"
    answer = server.predict(name, data=body, headers={"Content-Type": JSON})
    assert answer.status_code == 413
    assert "more than 100000 items" in answer.json()["message"]
    assert answer.elapsed.total_seconds() < 2


def test_a_model_without_workers_says_so(server, install):
    name = install(initial_workers=0)
    answer = server.predict(name, json=[1, 2])
    assert answer.status_code == 503
    assert answer.json()["message"].startswith(f'Model "{name}" has no worker')


def test_answers_in_pieces_make_no_list(server, install):
    source = (
        "from ts.handler_utils.utils import send_intermediate_predict_response as send\n"
        "def handle(data, context):\n"
        "    if data:\n"
        "        send(['piece'] * len(data), context.request_ids, '', 200, context)\n"
        "        return ['last'] * len(data)\n"
    )
    name = install(handler=source)
    answer = server.predict(name, json=[1, 2])
    assert (answer.status_code, answer.json()["type"]) == (500, "InternalServerException")
    assert "streams its answers" in answer.json()["message"]
    assert server.predict(name, data=b"x").text == "piecelast"


SLOW = """
import time
from pathlib import Path

def handle(data, context):
    if data is None:
        return None
    for row in data:
        with Path(row["body"]).open("a") as file:
            file.write("x")
    time.sleep(0.1)
    return ["done"] * len(data)
"""


def test_all_of_a_list_that_cannot_be_in_time_is_refused(server, install, record):
    name = install(handler=SLOW, batch_policy="adaptive")

    def ask(count, **headers):
        return server.predict(name, json=[str(record)] * count, headers=headers)

    for _ in range(8):
        assert rows_of(ask(4)) == ["done"] * 4
    # One batch of four would be in time, three would not.
    answer = ask(12, **{"X-Timeout-Ms": "250"})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert "cannot be answered in time" in answer.json()["message"]
    assert ask(4, **{"X-Timeout-Ms": "250"}).status_code == 200
    assert len(record.read_text()) == 9 * 4
