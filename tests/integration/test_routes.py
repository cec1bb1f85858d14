"""Every path that leads to a prediction, on real servers: what the handler gets, who may ask."""

import contextlib
import json
import re

import jsonschema
import pytest
import requests

pytestmark = pytest.mark.integration

DOUBLE = """
def handle(data, context):
    return data and [[2 * x for x in each["data"]] for each in data]
"""
TENSOR = {"name": "x", "shape": [3], "datatype": "INT64", "data": [1, 2, 3]}
SAY_IN = "def handle(data, context):\n    return data and ['in'] * len(data)\n"


def waiting_for(gate):
    """A handler that loads once the gate is open."""
    return f"""
from pathlib import Path

class Handler:
    def initialize(self, context):
        Path({gate.path!r}).read_text()

    def handle(self, data, context):
        return ["loaded"] * len(data)
"""


# -- what the handler gets -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def probe(start_server, handlers, make_archive):
    with start_server() as server:
        for version in ("1.0", "2.0"):
            archive = make_archive(
                server.store, handlers / "probe.py", f"probe-{version}", version=version
            )
            answer = server.register(archive, initial_workers=1, model_name="probe")
            assert answer.status_code == 200, answer.text
        yield server


ADDED = ("url_path", "explain")


def seen(answer):
    """What the handler was given: the data, and the headers that the server adds."""
    assert answer.status_code == 200, answer.text
    document = answer.json()
    added = {name: document["headers"][name] for name in ADDED if name in document["headers"]}
    return document["data"], added


@pytest.mark.parametrize(
    ("path", "added"),
    [
        ("/predictions/probe", {"url_path": "", "explain": "False"}),
        ("/predictions/probe/2.0/a/b", {"url_path": "a/b", "explain": "False"}),
        ("/explanations/probe", {"url_path": "", "explain": "True"}),
        ("/explanations/probe/1.0/a", {"url_path": "a", "explain": "True"}),
        ("/v1/models/probe:predict", {"explain": "False"}),
        ("/v1/models/probe:explain", {"explain": "True"}),
        ("/v2/models/probe/infer", {"explain": "False"}),
        ("/v2/models/probe/explain", {"explain": "True"}),
    ],
)
def test_these_ignore_the_query_and_say_whether_to_explain(probe, path, added):
    answer = probe.inference("POST", f"{path}?q=1", json={"instances": [1]})
    assert seen(answer) == ({"body": ["dict", {"instances": [1]}]}, added)


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("/invocations?model_name=probe&", {"model_name": ["bytearray", "probe"]}),
        ("/models/probe/invoke?", {}),
        ("/probe/predict?", {}),
        ("/probe/2.0/predict?", {}),
    ],
)
def test_these_give_the_query_to_the_handler_and_say_nothing(probe, path, named):
    answer = probe.inference("POST", f"{path}q=1&body=2", json=[1])
    data, added = seen(answer)
    assert data == {**named, "q": ["bytearray", "1"], "body": ["list", [1]]}
    assert list(data) == [*named, "q", "body"]
    assert added == {}


def test_a_parameter_of_the_query_has_an_empty_content_type(probe):
    headers = probe.inference("GET", "/probe/predict?q=1").json()["headers"]
    assert headers["q"] == {"content-type": ""}


def test_invocations_without_a_name_ask_the_only_model_of_the_start(
    prepare_server, handlers, make_archive
):
    with prepare_server() as server:
        make_archive(server.store, handlers / "probe.py", "probe")
        server.start("--models", "started=probe.mar")
        server.install(SAY_IN, "late")
        answer = server.inference("POST", "/invocations", data=b"x")
        assert seen(answer) == ({"body": ["bytearray", "x"]}, {})
        assert server.inference("POST", "/invocations?model_name=late").text == "in"
        server.stop()


# -- KServe and the Open Inference Protocol --------------------------------------------------------


def test_kserve_asks_management_whether_a_model_has_workers(probe):
    answer = probe.management("GET", "/v1/models/probe")
    assert (answer.status_code, answer.text) == (200, '{\n  "name": "probe",\n  "ready": true\n}\n')
    assert probe.management("PUT", "/v1/models/probe").status_code == 405
    assert probe.management("GET", "/v1/models/nobody").status_code == 404
    assert probe.management("GET", "/v1/models").status_code == 404
    found = probe.inference("GET", "/v1/models/probe").json()
    assert (found["name"], found["ready"], found["id"]) == ("probe", True, "probe")


def test_a_model_without_workers_is_not_ready_for_kserve(probe, make_archive):
    probe.install(SAY_IN, "idle", initial_workers=0)
    assert probe.management("GET", "/v1/models/idle").json() == {"name": "idle", "ready": False}
    assert probe.inference("POST", "/v1/models/idle:predict").status_code == 503
    answer = probe.inference("GET", "/v1/models/idle")
    assert (answer.status_code, answer.json()["ready"]) == (503, False)


@pytest.fixture(scope="module")
def open_inference(prepare_server):
    environment = {"TS_OPEN_INFERENCE_PROTOCOL": "oip"}
    with prepare_server(environment, service_envelope="kservev2") as server:
        server.start()
        server.install(DOUBLE, "double", batch_size=4)
        yield server
        server.stop()


@pytest.mark.parametrize("path", ["/v2/models/double", "/v2/models/double/versions/1.0"])
def test_tensors_are_inferred_over_the_open_protocol(open_inference, path):
    answer = open_inference.inference("POST", f"{path}/infer", json={"id": "7", "inputs": [TENSOR]})
    assert answer.json() == {
        "id": "7",
        "model_name": "archive-of-double",
        "model_version": "1.0",
        "outputs": [{"name": "x", "datatype": "INT64", "data": [2, 4, 6], "shape": [3]}],
    }
    assert open_inference.inference("GET", path).json()["versions"] == ["1.0"]
    assert open_inference.inference("GET", f"{path}/ready").json()["ready"] is True


def test_the_open_protocol_is_off_unless_asked_for(probe, open_inference):
    for path in ("/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/double"):
        assert open_inference.inference("GET", path).status_code == 200
        assert probe.inference("GET", path).status_code == 404


def test_the_api_description_lists_the_open_protocol_where_it_is_on(probe, open_inference):
    def paths(server):
        return server.inference("GET", "/api-description").json()["paths"].keys()

    more = paths(open_inference) - paths(probe)
    assert {"/v2", "/v2/health/ready", "/v2/models/{model_name}/ready"} <= more
    assert all(path.startswith("/v2") for path in more)


def test_what_is_answered_is_what_is_described(open_inference):
    document = open_inference.inference("GET", "/api-description").json()
    for path, methods in document["paths"].items():
        if "get" not in methods:
            continue
        target = path.replace("{model_name}", "double").replace("{model_version}", "1.0")
        answer = open_inference.inference("GET", target)
        described = methods["get"]["responses"][str(answer.status_code)]
        schema = described["content"]["application/json"]["schema"]
        jsonschema.validate(answer.json(), {**schema, "components": document["components"]})


@pytest.mark.parametrize("listener", ["inference", "management", "metrics"])
def test_a_browser_is_shown_a_page_whose_links_work(probe, listener):
    url = f"http://127.0.0.1:{probe.ports[listener]}"
    browser = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
    page = requests.get(f"{url}/", headers=browser, timeout=20)
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    links = re.findall(r'href="(.+?)"', page.text)
    assert "/api-description" in links
    assert len(links) > 1
    for link in links:
        assert requests.get(f"{url}{link}", headers=browser, timeout=20).status_code == 200


@pytest.mark.parametrize("accept", [None, "*/*", "application/json"])
@pytest.mark.parametrize("method", ["GET", "HEAD", "POST"])
def test_a_program_hears_at_the_root_what_torchserve_says(probe, method, accept):
    answer = probe.inference(method, "/", headers={"Accept": accept})
    assert answer.status_code == 405
    assert method == "HEAD" or answer.json()["type"] == "MethodNotAllowedException"


def test_nothing_but_looking_shows_the_page(probe):
    assert probe.inference("POST", "/", headers={"Accept": "text/html"}).status_code == 405
    assert probe.inference("GET", "//x", headers={"Accept": "text/html"}).status_code == 404


# -- readiness -------------------------------------------------------------------------------------


def test_a_server_is_ready_once_its_models_have_loaded(open_inference, gate, wait_for):
    ready = {"status": "Ready"}
    assert open_inference.inference("GET", "/ready").json() == ready
    open_inference.install(waiting_for(gate), "slow", synchronous="false", initial_workers=0)
    assert open_inference.inference("GET", "/ready").json() == ready
    open_inference.management("PUT", "/models/slow?min_worker=1")
    gate.wait_entered()
    answer = open_inference.inference("GET", "/ready")
    assert answer.status_code == 503
    assert answer.json() == {"status": "Not ready", "models": ["slow"]}
    assert open_inference.inference("GET", "/ping").json() == {"status": "Healthy"}
    for path, status in (("/v2/health/ready", 503), ("/v2/health/live", 200)):
        assert open_inference.inference("GET", path).status_code == status
    slow = open_inference.inference("GET", "/v2/models/slow/ready")
    assert (slow.status_code, slow.json()) == (503, {"name": "slow", "ready": False})
    gate.open()
    wait_for(lambda: open_inference.inference("GET", "/ready").json() == ready)
    assert open_inference.inference("GET", "/v2/health/ready").json() == {"ready": True}


# -- a listener for both ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def start_shared(prepare_server, make_archive):
    """Start a server whose inference and management share an address."""

    @contextlib.contextmanager
    def start(**properties):
        with prepare_server(**properties) as server:
            server.ports["management"] = server.ports["inference"]
            address = f"http://127.0.0.1:{server.ports['inference']}"
            server.write_property("management_address", address)
            make_archive(server.store, SAY_IN, "m")
            server.start()
            yield server
            server.stop()

    return start


def test_both_share_an_address(start_shared):
    with start_shared() as server:
        assert server.register("m.mar", initial_workers=1).status_code == 200
        assert server.inference("POST", "/models/m/invoke").text == "in"
        assert server.inference("POST", "/m/1.0/predict").text == "in"
        assert server.inference("POST", "/v1/models/m:predict").text == "in"
        assert server.management("GET", "/v1/models/m").json()["ready"] is True
        [described] = server.management("GET", "/models/m/1.0").json()
        assert described["modelVersion"] == "1.0"
        assert server.management("PUT", "/models/m/1.0?min_worker=1").status_code == 202
        assert server.management("PUT", "/models/m/1.0/set-default").status_code == 200
        assert server.management("DELETE", "/models/m/1.0").status_code == 200
        paths = server.inference("OPTIONS", "/").json()["paths"]
        assert {"/ready", "/models/{model_name}/invoke", "/models", "/token"} <= paths.keys()


def test_a_version_named_invoke_stays_within_reach(start_shared, make_archive):
    with start_shared() as server:
        archive = make_archive(server.store, SAY_IN, "odd", version="invoke")
        assert server.register(archive, initial_workers=1).status_code == 200
        assert server.inference("POST", "/models/odd/invoke").text == "in"
        [described] = server.management("GET", "/models/odd/invoke").json()
        assert described["modelVersion"] == "invoke"
        assert server.management("DELETE", "/models/odd/invoke").status_code == 200
        assert server.inference("GET", "/models/odd/invoke").status_code == 404


def test_on_a_shared_address_each_side_wants_its_own_key_only(start_shared):
    with start_shared(disable_token_authorization="false", enable_model_api="true") as server:
        content = json.loads((server.directory / "key_file.json").read_text())
        inference, management = (
            {"Authorization": f"Bearer {content[kind]['key']}"}
            for kind in ("inference", "management")
        )
        made = server.management("POST", "/models?url=m.mar&initial_workers=1", headers=management)
        assert made.status_code == 200, made.text
        for path in ("/models/m/1.0", "/v1/models/m", "/models"):
            assert server.management("GET", path, headers=management).status_code == 200
            assert server.management("GET", path, headers=inference).status_code == 400
            assert server.management("GET", path).status_code == 400
        for path in (
            "/models/m/invoke",
            "/m/predict",
            "/v1/models/m:predict",
            "/v2/models/m/infer",
        ):
            assert server.inference("POST", path, headers=inference).text == "in"
            assert server.inference("POST", path, headers=management).status_code == 400
            assert server.inference("POST", path).status_code == 400
        assert server.inference("GET", "/ready").json() == {"status": "Ready"}
        assert server.inference("GET", "/ping").status_code == 400
        api = {"Authorization": f"Bearer {content['API']['key']}"}
        assert server.management("GET", "/token?type=management", headers=api).status_code == 200
