"""A request changes something only with a method that is documented for its path."""

import re

import pytest

from marserve.frontend.rest.api_description import describe_listener

pytestmark = pytest.mark.integration

METHODS = ("GET", "HEAD", "OPTIONS", "TRACE", "POST", "PUT", "PATCH", "DELETE", "LINK")
SAFE = {"GET", "HEAD", "OPTIONS", "TRACE"}
NAMES = {"model_name": "m", "model_version": "1.0", "workflow_name": "w", "logger_name": "root"}
# What would change a setting, if the method were not looked at.
QUERY = "url=other.mar&model_name=other&min_worker=0&batch_size=7&level=error&type=inference"
HANDLER = "def handle(data, context):\n    return data and ['in'] * len(data)\n"
LISTENERS = {name: [name.capitalize()] for name in ("inference", "management", "metrics")}


@pytest.fixture(scope="module")
def server(share_server, make_archive, make_workflow):
    with share_server(ts_open_inference_protocol="true") as server:
        for name in ("m", "other"):
            make_archive(server.store, HANDLER, name)
        assert server.register("m.mar", initial_workers=1).ok
        archive = make_workflow(server.store, "w", "models: {n: {url: m.mar}}\ndag: {n: []}\n")
        assert server.management("POST", "/workflows", params={"url": archive.name}).ok
        yield server


def state(server):
    """What requests can change."""
    keys = (server.directory / "key_file.json").read_text()
    paths = ("/models", "/workflows", "/loggers")
    lists = [server.management("GET", path).json() for path in paths]
    settings = ("modelVersion", "minWorkers", "maxWorkers", "batchSize")
    versions = server.management("GET", "/models/m/all").json()
    return keys, lists, [{name: each[name] for name in settings} for each in versions]


@pytest.mark.parametrize("listener", LISTENERS)
def test_only_documented_methods_change_anything(server, listener):
    paths = describe_listener(LISTENERS[listener], open_inference=True)["paths"]
    before = state(server)
    for path, operations in paths.items():
        documented = {method.upper() for method in operations}
        target = re.sub(r"{(\w+)}", lambda found: NAMES.get(found[1], "x"), path)
        for method in METHODS:
            if method in SAFE or method not in documented:
                sent = {"data": b"{}", "stream": True}  # an answer may be a stream without end
                server._request(listener, method, f"{target}?{QUERY}", sent).close()
        assert state(server) == before, path


@pytest.mark.parametrize("method", [each for each in METHODS if each != "POST"])
@pytest.mark.parametrize(("verb", "model"), [("load", "other"), ("unload", "m")])
def test_the_repository_is_changed_by_post_only(server, method, verb, model):
    answer = server.management(method, f"/v2/repository/models/{model}/{verb}")
    assert answer.status_code == 405
    assert method == "HEAD" or answer.json()["type"] == "MethodNotAllowedException"
    assert server.is_known(model) == (verb == "unload")
