"""Workflows at a server: what nodes get, what clients get, and what operators see."""

import json

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.quick]

ECHO = "def handle(data, context):\n    return data and [row['body'] for row in data]\n"


@pytest.fixture(scope="module")
def functions(handlers):
    return (handlers / "functions.py").read_text()


@pytest.fixture(scope="module", autouse=True)
def echo(server, make_archive):
    make_archive(server.store, ECHO, "echo")


@pytest.fixture
def install(install_workflow, functions):
    def make(dag, models="", **query):
        text = f"models: {{retry-attempts: 0, {models}}}\ndag: {{{dag}}}\n"
        return install_workflow(text, functions, **query)

    return make


@pytest.fixture
def run(server):
    def ask(name, **kwargs):
        return server.inference("POST", f"/wfpredict/{name}", **kwargs)

    return ask


# -- what nodes get --------------------------------------------------------------------------------


def test_the_start_node_gets_the_request_and_its_headers(install, run):
    name = install("tell: []")
    answer = run(name, data=b"hello", headers={"X-Word": "abc", "Content-Type": "text/x"})
    assert answer.json()["parts"] == {"body": "hello"}
    assert answer.json()["header"] == "abc"
    assert answer.json()["id"].startswith(answer.headers["x-request-id"])
    form = run(name, files={"a": b"1", "b": b"2"}).json()
    assert form["parts"] == {"a": "1", "b": "2"}
    assert run(name, json={"k": 1}).json()["parts"] == {"body": {"k": 1}}


def test_a_node_with_one_parent_gets_its_output_as_body_and_the_headers(install, run):
    name = install("repeat: [m], m: [tell]", "m: {url: echo.mar}")
    answer = run(name, json=[1], headers={"X-Word": "abc"}).json()
    assert answer["parts"] == {"body": "[\n  1\n]"}  # no media type: it is not decoded
    assert answer["header"] == "abc"


def test_a_node_with_several_parents_gets_a_part_for_each(install, run):
    models = "m1: {url: echo.mar}, m2: {url: echo.mar}"
    name = install("repeat: [m1, m2], m1: [tell], m2: [tell]", models)
    assert run(name, data=b"x").json()["parts"] == {"m1": "x", "m2": "x"}


@pytest.mark.parametrize("method", ["GET", "PUT", "PATCH", "DELETE", "POST"])
def test_any_method_runs_a_workflow(install, server, method):
    name = install("tell: []")
    for path in (f"/wfpredict/{name}", f"/WfPredict/{name}", f"/wfpredict/{name}/ignored"):
        assert server.inference(method, path).status_code == 200


# -- what clients get ------------------------------------------------------------------------------


def test_one_leaf_is_answered_as_it_is_and_called_json(install, run):
    answer = run(install("text: []"))
    assert (answer.status_code, answer.reason, answer.text) == (200, "OK", "plain words")
    assert answer.headers["content-type"] == "application/json"
    assert run(install("octets: []")).content == b"\xff\xfe"


def test_what_the_handler_of_the_only_leaf_sets_is_kept(install, run):
    answer = run(install("repeat: [created]"))
    assert (answer.status_code, answer.reason, answer.text) == (201, "Made", "made")
    assert answer.headers["content-type"] == "text/plain"
    assert answer.headers["x-mine"] == "yes"


def test_several_leaves_are_members_of_an_object(install, run):
    answer = run(install("repeat: [again, items, text]"), data=b'{"a": 1}')
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == {"again": {"a": 1}, "items": [1, 2], "text": "plain words"}
    answer = run(install("repeat: [again, octets]"), data=b"{}")
    assert answer.status_code == 500
    assert "The output of octets is neither JSON nor text" in answer.json()["message"]


def test_an_answer_in_pieces_is_passed_on_whole(install, run):
    assert run(install("streams: []")).text == "one two three"
    answer = run(install("streams: [tell]"))
    assert answer.json()["parts"] == {"body": "one two three"}
    assert "ts_stream_next" not in answer.headers


def test_a_handlers_error_status_ends_the_run(install, run, server, record):
    name = install("refuse: [noted]")
    answer = run(name, json={"record": str(record)})
    assert (answer.status_code, answer.text) == (422, "not that")
    assert answer.headers["x-failed-node"] == "refuse"
    assert [node["node"] for node in server.runs(name)[-1]["nodes"]] == ["refuse"]
    assert record.read_text() == ""


def test_a_node_that_fails_is_named_with_the_reason(install, run):
    answer = run(install("repeat: [boom]"))
    assert answer.status_code == 500
    document = answer.json()
    message = document["cause"].pop("message")
    assert document == {
        "code": 500,
        "type": "InternalServerException",
        "message": "Error executing boom",
        "node": "boom",
        "cause": {"code": 503, "type": "InternalServerException"},
    }
    assert message.startswith("Prediction failed. The traceback is in ")


def test_a_node_that_takes_too_long_fails(install, run, gate):
    name = install("gated: []", "timeout-ms: 100")
    answer = run(name, json={"gate": gate.path})
    assert answer.json()["message"] == "Error executing gated"
    assert answer.json()["cause"]["message"] == "No output within timeout-ms=100."
    gate.open_for_all()


def test_a_failure_is_tried_again(install, run, server, record):
    name = install("first_fails: []", "retry-attempts: 1")
    assert run(name, json={"record": str(record)}).status_code == 200
    [node] = server.runs(name)[-1]["nodes"]
    assert (node["attempts"], node["outcome"]) == (2, "answered")
    record.write_text("")
    name = install("first_fails: []")
    assert run(name, json={"record": str(record)}).status_code == 500
    assert record.read_text().split() == ["first_fails"]


@pytest.mark.parametrize("path", ["/wfpredict", "/wfpredict/"])
def test_without_a_name_there_is_no_route(server, path):
    assert server.inference("POST", path).json()["type"] == "ResourceNotFoundException"


def test_an_unknown_workflow(server):
    answers = [
        server.inference("POST", "/wfpredict/nobody"),
        server.management("GET", "/workflows/nobody"),
        server.management("GET", "/workflows/nobody/runs"),
        server.management("DELETE", "/workflows/nobody"),
    ]
    for answer in answers:
        assert answer.status_code == 404
        assert answer.json() == {
            "code": 404,
            "type": "WorkflowNotFoundException",
            "message": "Workflow not found: nobody",
        }


# -- what operators see ----------------------------------------------------------------------------


def test_a_workflow_is_described_with_torchserves_members_and_ours(install, server):
    name = install("repeat: [m], m: [tell]", "max-workers: 2, batch-size: 4, m: {url: echo.mar}")
    description = server.workflow(name)
    assert list(description)[:7] == [
        "workflowName",
        "workflowUrl",
        "minWorkers",
        "maxWorkers",
        "batchSize",
        "maxBatchDelay",
        "workflowDag",
    ]
    assert description["workflowUrl"] == f"{name}.war"
    assert description["workflowDag"] == "{repeat=[m], m=[tell]}"
    assert description["runs"] == {"underWay": 0, "most": 100}
    assert description["nodes"][1] == {
        "node": "m",
        "modelName": f"{name}__m",
        "isFunction": False,
        "parents": ["repeat"],
        "timeoutMs": 10000,
        "retryAttempts": 0,
    }
    assert description["longestRunMs"] == 30_000
    model = server.describe(f"{name}__m")
    assert (model["minWorkers"], model["maxWorkers"]) == (2, 2)
    assert (model["batchSize"], model["maxBatchDelay"]) == (4, 50)
    function = server.describe(f"{name}__tell")
    assert "modelUrl" not in function
    assert (function["maxWorkers"], function["batchSize"], function["maxBatchDelay"]) == (1, 1, 0)


def test_workflows_are_listed_by_name_and_page(install, server):
    names = sorted(install("text: []") for _ in range(3))
    pages = [
        server.management("GET", f"/workflows?limit=2&next_page_token={first}").json()
        for first in (0, 1, 2)
    ]
    listed = [[each["workflowName"] for each in page["workflows"]] for page in pages]
    assert listed == [names[:2], names[1:], names[2:]]
    assert [page.get("nextPageToken") for page in pages] == ["2", "3", None]
    assert server.management("GET", "/workflows").json()["workflows"][0] == {
        "workflowName": names[0],
        "workflowUrl": f"{names[0]}.war",
    }


def test_models_of_nodes_are_listed_and_functions_are_not(install, server):
    name = install("repeat: [m]", "m: {url: echo.mar}")
    models = server.management("GET", "/models").json()["models"]
    assert models == [{"modelName": f"{name}__m", "modelUrl": "echo.mar"}]
    assert server.inference("POST", f"/predictions/{name}__repeat", data=b"x").text == "x"


def test_the_time_line_of_a_run(install, run, server):
    name = install("repeat: [again, text], again: [tell], text: [tell]")
    identity = run(name, data=b"{}").headers["x-request-id"]
    [line] = server.runs(name)
    assert (line["id"], line["outcome"]) == (identity, "answered")
    nodes = {node["node"]: node for node in line["nodes"]}
    assert list(nodes) == ["repeat", "again", "text", "tell"]
    for node in nodes.values():
        assert node["attempts"] == 1
        assert 0 <= node["queuedMs"] <= node["startedMs"] <= node["endedMs"] <= line["tookMs"]
    assert nodes["tell"]["queuedMs"] >= max(nodes["again"]["endedMs"], nodes["text"]["endedMs"])


def test_runs_and_nodes_have_metrics(install, run, server):
    name = install("repeat: [boom]")
    run(name, data=b"x")

    def value(metric, **labels):
        wanted = {f'{key}="{text}"' for key, text in {"workflow_name": name, **labels}.items()}
        found = [
            number
            for series, number in server.metrics(metric).items()
            if all(label in series for label in wanted)
        ]
        assert len(found) == 1, (metric, found)
        return found[0]

    assert value("marserve_workflow_runs_total", outcome="failed") == 1
    assert value("marserve_workflow_runs_total", outcome="answered") == 0
    assert value("marserve_workflow_node_seconds_count", node="repeat") == 1
    assert value("marserve_workflow_failed_tries_total", node="boom") == 1
    server.management("DELETE", f"/workflows/{name}")
    assert name not in server.metrics("marserve_workflow_runs_total")


# -- registering -----------------------------------------------------------------------------------


def test_what_nobody_reads_in_a_registration_was_passed_over_in_silence(
    server, functions, make_workflow
):
    make_workflow(server.store, "unread", "models: {}\ndag: {text: []}\nnodes: 3\n", functions)
    answer = server.management("POST", "/workflows?url=unread.war&workflow=x&synchronous=true")
    assert answer.json()["warnings"] == [
        "workflow is not a parameter of this server.",
        "the specification has no nodes; its keys are models, dag.",
    ]
    server.wait_logged("ts_log.log", "Registration of unread.war: the specification has no nodes;")
    server.management("DELETE", "/workflows/unread")


def test_a_query_beside_json_does_not_count_in_a_registration(server, functions, make_workflow):
    make_workflow(server.store, "beside", "models: {}\ndag: {text: []}", functions)
    path = "/workflows?workflow_name=other&synchronous=true"
    answer = server.management("POST", path, json={"url": "beside.war"})
    found = "'workflow_name' in the query does not count beside a body of JSON."
    assert found in answer.json()["warnings"]
    assert server.management("DELETE", "/workflows/beside").status_code == 200


def test_the_name_may_be_chosen_and_json_is_taken(server, functions, make_workflow):
    make_workflow(server.store, "named", "models: {}\ndag: {text: []}", functions)
    body = {"url": "named.war", "workflow_name": "chosen", "response_timeout": 7}
    answer = server.management("POST", "/workflows", json=body)
    assert answer.json() == {
        "status": "Workflow chosen has been registered and scaled successfully."
    }
    model = server.describe("chosen__text")
    assert (model["responseTimeout"], model["startupTimeout"]) == (7, 120)
    answer = server.management("DELETE", "/workflows/chosen")
    assert answer.json() == {"status": 'Workflow "chosen" unregistered'}
    assert not server.is_known("chosen__text")


def test_what_cannot_be_registered_leaves_nothing(server, functions, make_workflow):
    cases = {
        "models: {m: {url: gone.mar}}\ndag: {text: [m]}": (
            "Failures: [Workflow Node {name}__m failed to register. "
            "Details: Model not found at: gone.mar]"
        ),
        "models: {}\ndag: {text: [gone]}": "Failed to start workers for model {name}__gone",
    }
    for number, (specification, message) in enumerate(cases.items()):
        name = f"broken{number}"
        make_workflow(server.store, name, specification, functions)
        answer = server.management("POST", f"/workflows?url={name}.war")
        assert (answer.status_code, answer.json()["type"]) == (500, "WorkflowException")
        assert answer.json()["message"].startswith(f"Workflow {name} has failed to register. ")
        assert message.format(name=name) in answer.json()["message"]
        assert not server.is_known(f"{name}__text")
    assert server.management("GET", "/workflows").json()["workflows"] == []
    assert server.unpacked_workflows() == server.unpacked() == set()


def test_a_name_is_taken_once(install, server, together):
    name = install("text: []")
    answer = server.management("POST", f"/workflows?url={name}.war")
    assert answer.status_code == 409
    assert answer.json()["type"] == "ConflictStatusException"
    assert answer.json()["message"] == f"Workflow {name} is already registered."
    server.management("DELETE", f"/workflows/{name}")
    calls = [lambda: server.management("POST", f"/workflows?url={name}.war").status_code] * 4
    assert sorted(together(calls)) == [200, 409, 409, 409]


def test_a_model_that_has_the_name_of_a_node_is_left_alone(server, functions, make_workflow):
    server.register("echo.mar", model_name="taken__text", initial_workers=0)
    make_workflow(server.store, "taken", "models: {}\ndag: {repeat: [text]}", functions)
    answer = server.management("POST", "/workflows?url=taken.war")
    assert answer.status_code == 500
    assert "Model taken__text is registered already" in answer.json()["message"]
    assert server.is_known("taken__text")
    assert not server.is_known("taken__repeat")
    server.management("DELETE", "/models/taken__text")


def test_a_node_that_is_unregistered_by_itself_is_told(install, server, run):
    name = install("repeat: [text]")
    server.management("DELETE", f"/models/{name}__text")
    answer = run(name, data=b"x").json()
    assert answer["message"] == "Error executing text"
    assert answer["cause"]["message"] == f"Model not found: {name}__text"
    assert server.management("DELETE", f"/workflows/{name}").status_code == 200


def test_downloads_go_to_the_store_and_leave_with_the_workflow(
    server, functions, make_workflow, tmp_path
):
    archive = make_workflow(tmp_path, "fetched", "models: {}\ndag: {text: []}", functions)
    url = f"file://{archive}"
    assert server.management("POST", "/workflows", params={"url": url}).status_code == 200
    assert (server.store / "fetched.war").is_file()
    server.management("DELETE", "/workflows/fetched")
    assert not (server.store / "fetched.war").exists()


def test_methods_and_parameters_that_are_refused(server):
    def answer(method, path):
        answer = server.management(method, path)
        return answer.status_code, answer.json()["type"]

    assert answer("PUT", "/workflows") == (405, "MethodNotAllowedException")
    assert answer("DELETE", "/workflows") == (405, "MethodNotAllowedException")
    assert answer("PUT", "/workflows/w") == (405, "MethodNotAllowedException")
    assert answer("GET", "/workflows/w/x/y") == (404, "ResourceNotFoundException")
    assert answer("POST", "/workflows") == (400, "BadRequestException")
    assert answer("POST", "/workflows?url=gone.war") == (404, "WorkflowNotFoundException")
    assert answer("POST", "/workflows?url=../x.war") == (404, "WorkflowNotFoundException")
    assert answer("POST", "/workflows?url=a.war&response_timeout=0") == (400, "BadRequestException")
    document = server.management("OPTIONS", "/workflows").json()
    assert "/workflows/{workflow_name}" in document["paths"]


# -- stores, snapshots, rights ---------------------------------------------------------------------


def test_workflows_have_a_store_of_their_own_and_are_not_loaded_at_start_or_saved(
    start_server, make_archive, make_workflow, functions, tmp_path
):
    text = "models: {m: {url: echo.mar}}\ndag: {repeat: [m]}"
    make_workflow(tmp_path, "apart", text, functions)
    with start_server(workflow_store=str(tmp_path), load_models="all") as server:
        server.habits = []
        make_archive(server.store, ECHO, "echo")
        assert server.management("POST", "/workflows?url=apart.war").status_code == 200
        assert server.inference("POST", "/wfpredict/apart", data=b"x").text == "x"
        saved = server.management("GET", "/models").json()["models"]
        assert [each["modelName"] for each in saved] == ["apart__m"]
        for path in (server.directory / "logs" / "config").glob("*.cfg"):
            assert "apart__" not in path.read_text()
        server.stop()


def test_registering_workflows_is_off_where_registering_models_is(start_server):
    with start_server(enable_model_api="false") as server:
        for method, path in (("POST", "/workflows?url=a.war"), ("DELETE", "/workflows/a")):
            answer = server.management(method, path)
            assert answer.json()["type"] == "MethodNotAllowedException"


def test_workflows_need_the_keys_of_their_listeners(start_server):
    with start_server(disable_token_authorization="false") as server:
        keys = json.loads((server.directory / "key_file.json").read_text())
        for listener, path in (("management", "/workflows"), ("inference", "/wfpredict/w")):
            ask = getattr(server, listener)
            assert ask("GET", path).json()["type"] == "InvalidKeyException"
            header = {"Authorization": f"Bearer {keys[listener]['key']}"}
            assert ask("GET", path, headers=header).status_code in (200, 404)


def test_only_allowed_urls_are_fetched(start_server):
    with start_server(allowed_urls="https://example.org/.*") as server:
        answer = server.management("POST", "/workflows?url=file:///etc/x.war")
        assert (answer.status_code, answer.json()["type"]) == (404, "WorkflowNotFoundException")


# -- errors of inner nodes -------------------------------------------------------------------------

TEXTS = "def handle(data, context):\n    return data and [{'seen': str(row)} for row in data]\n"
RAISING = """
from ts.utils.util import PredictionException

def handle(data, context):
    if data:
        raise PredictionException("too bright", 422)
"""


def test_a_node_that_refuses_the_output_of_another_is_named(
    start_server, make_workflow, make_archive
):
    with start_server(service_envelope="json") as server:
        for model in "ab":
            make_archive(server.store, TEXTS, model)
        text = "models:\n  a: {url: a.mar}\n  b: {url: b.mar}\ndag: {a: [b]}\n"
        make_workflow(server.store, "w", text)
        answer = server.management("POST", "/workflows", params={"url": "w.war"})
        assert answer.status_code == 200, answer.text
        answer = server.inference("POST", "/wfpredict/w", json={"instances": [{"data": "hello"}]})
        assert (answer.status_code, answer.json()["type"]) == (500, "InternalServerException")
        assert answer.json()["message"] == (
            "Error executing b: it refused its input, the output of a. The body must be a JSON "
            'object with a list: {"instances": [...]}.'
        )
        assert (answer.json()["node"], answer.json()["cause"]["code"]) == ("b", 400)
        wrong = server.inference("POST", "/wfpredict/w", json={"data": "hello"})
        assert (wrong.status_code, wrong.headers["x-failed-node"]) == (400, "a")


def test_a_node_whose_handler_raises_a_status_is_named(install, run, server, make_archive):
    make_archive(server.store, RAISING, "raising")
    answer = run(install("repeat: [m]", "m: {url: raising.mar}"), json=1)
    assert answer.status_code == 422
    message = answer.json()["message"]
    assert message == "Error executing m with the output of repeat: too bright"
