"""Who may do what: tokens, the model API, and what is bound where."""

import json
import socket
import stat

import pytest
from grpc_client import connected, failure
from servers import PATIENCE

from marserve.frontend.security.tokens import REFUSED as REFUSED_TOKEN

pytestmark = pytest.mark.integration

FORWARDED = {"X-Forwarded-For": "203.0.113.9"}
SAYS_AUTHORIZATION = """
def handle(data, context):
    headers = context.get_all_request_header(0) if data else {}
    return data and [headers["Authorization"]]
"""

REFUSED = {
    "code": 400,
    "type": "InvalidKeyException",
    "message": REFUSED_TOKEN,
}


@pytest.fixture(scope="module")
def guarded(start_server, make_archive):
    with start_server(disable_token_authorization="false") as server:
        make_archive(server.store, "def handle(d, c):\n    return d and ['in'] * len(d)\n", "m")
        yield server


def keys(server):
    content = json.loads((server.directory / "key_file.json").read_text())
    return {kind: content[kind]["key"] for kind in ("management", "inference", "API")}


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


def test_the_key_file(guarded):
    path = guarded.directory / "key_file.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    content = json.loads(path.read_text())
    assert list(content) == ["management", "inference", "API"]
    assert list(content["inference"]) == ["key", "expiration time"]
    assert len({item["key"] for item in content.values()}) == 3
    assert all(len(item["key"]) == 8 for item in content.values())
    guarded.wait_printed(f"the keys are in {path}")


@pytest.mark.parametrize("path", ["/ping", "/predictions/m"])
def test_the_inference_listener_wants_its_key(guarded, path):
    wrong = [None, "", "Bearer", "Bearer x", f"Bearer {keys(guarded)['management']}"]
    wrong += [f"bearer {keys(guarded)['inference']}", f"Basic {keys(guarded)['inference']}"]
    for value in wrong:
        headers = {} if value is None else {"Authorization": value}
        answer = guarded.inference("GET", path, headers=headers)
        assert (answer.status_code, answer.json()) == (400, REFUSED), value


@pytest.mark.parametrize("listener", ["inference", "management"])
def test_a_preflight_of_a_browser_needs_no_key(start_server, listener):
    origin = "https://page.example"
    preflight = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    with start_server(disable_token_authorization="false", cors_allowed_origin=origin) as server:

        def ask(method, headers):
            return server._request(listener, method, "/models/nobody/invoke", {"headers": headers})

        answer = ask("OPTIONS", preflight)
        assert (answer.status_code, answer.content) == (200, b"")
        assert answer.headers["access-control-allow-origin"] == origin
        for refused in (ask("OPTIONS", {"Origin": origin}), ask("POST", preflight)):
            assert refused.json() == REFUSED
            assert refused.headers["access-control-allow-origin"] == origin


def test_without_cors_a_preflight_needs_the_key(guarded):
    preflight = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
    answer = guarded.inference("OPTIONS", "/predictions/m", headers=preflight)
    assert (answer.status_code, answer.json()) == (400, REFUSED)


def test_the_management_listener_wants_its_key(guarded):
    for headers in ({}, bearer(keys(guarded)["inference"]), bearer(keys(guarded)["API"])):
        answer = guarded.management("GET", "/models", headers=headers)
        assert (answer.status_code, answer.json()) == (400, REFUSED)
        assert guarded.management("POST", "/models?url=m.mar", headers=headers).status_code == 400


def test_with_the_right_keys_everything_works(guarded):
    management = bearer(keys(guarded)["management"])
    inference = bearer(keys(guarded)["inference"])
    query = "/models?url=m.mar&initial_workers=1"
    assert guarded.management("POST", query, headers=management).status_code == 200
    assert guarded.inference("GET", "/ping", headers=inference).status_code == 200
    assert guarded.inference("GET", "/predictions/m", headers=inference).text == "in"
    assert guarded.management("DELETE", "/models/m", headers=management).status_code == 200


def test_metrics_are_open(guarded):
    assert guarded.metrics("Requests4XX")


def test_a_key_is_renewed(guarded):
    before = keys(guarded)
    for kind in ("inference", "management"):
        url = f"/token?type={kind}"
        answer = guarded.management("GET", url, headers=bearer(before["API"]))
        assert (answer.status_code, answer.text) == (200, "\n")
        assert answer.headers["content-type"] == "application/json"
    after = keys(guarded)
    assert after["API"] == before["API"]
    assert after["inference"] != before["inference"]
    old, new = bearer(before["inference"]), bearer(after["inference"])
    assert guarded.inference("GET", "/ping", headers=old).status_code == 400
    assert guarded.inference("GET", "/ping", headers=new).status_code == 200
    assert stat.S_IMODE((guarded.directory / "key_file.json").stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("query", "key"),
    [("?type=inference", "management"), ("?type=API", "API"), ("", "API"), ("?type=", "API")],
)
def test_a_renewal_that_is_refused(guarded, query, key):
    before = keys(guarded)
    answer = guarded.management("GET", f"/token{query}", headers=bearer(before[key]))
    assert (answer.status_code, answer.json()["type"]) == (400, "InvalidKeyException")
    assert answer.json()["message"].startswith("Token Authentication failed.")
    assert keys(guarded) == before


def test_keys_expire(start_server, wait_for):
    with start_server(disable_token_authorization="false", token_expiration_min="0.01") as server:
        inference = bearer(keys(server)["inference"])
        wait_for(lambda: server.inference("GET", "/ping", headers=inference).status_code == 400)
        renewal = server.management(
            "GET", "/token?type=inference", headers=bearer(keys(server)["API"])
        )
        assert renewal.status_code == 200
        inference = bearer(keys(server)["inference"])
        assert server.inference("GET", "/ping", headers=inference).status_code == 200


def test_on_loopback_local_requests_need_no_key(start_server):
    with start_server() as server:
        assert server.register("no.mar").json()["type"] == "ModelNotFoundException"
        console = server.console_text()
        assert "Token authorization is off: disable_token_authorization is not set" in console
        with socket.socket() as outside:
            address = (own_address(), server.ports["management"])
            assert outside.connect_ex(address) != 0


def test_on_loopback_keys_are_written_checked_and_renewed(server):
    before = keys(server)
    assert stat.S_IMODE((server.directory / "key_file.json").stat().st_mode) == 0o600
    for kind in ("inference", "management"):
        url = f"/token?type={kind}"
        assert server.management("GET", url).status_code == 400
        assert server.management("GET", url, headers=bearer(before["API"])).status_code == 200
    after = keys(server)
    for key, status in ((before["management"], 400), (after["management"], 200)):
        answer = server.management("GET", "/models", headers=bearer(key))
        assert answer.status_code == status


def test_on_loopback_it_starts_where_keys_cannot_be_written(prepare_server):
    with prepare_server() as server:
        (server.directory / "key_file.json").mkdir()
        server.start()
        server.wait_printed("There are no keys, which local requests do not need")
        assert server.management("GET", "/models").status_code == 200
        assert server.management("GET", "/models", headers=FORWARDED).status_code == 403
        server.stop()


def test_a_server_without_its_ports_leaves_the_key_file_of_another(prepare_server):
    with prepare_server() as server, socket.socket() as other:
        other.bind(("127.0.0.1", server.ports["inference"]))
        other.listen()
        server.write_property("disable_token_authorization", "false")
        file = server.directory / "key_file.json"
        file.write_text("theirs")
        assert server.launch().wait(PATIENCE) == 1
        server.wait_printed("another program listens there")
        assert file.read_text() == "theirs"


@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
def test_an_application_may_send_handlers_its_own_authorization(server, install, scheme):
    name = install(handler=SAYS_AUTHORIZATION)
    authorization = f"{scheme} of-an-application"
    answer = server.predict(name, headers={"Authorization": authorization})
    assert answer.text == authorization
    query = {"Authorization": "Basic bmV0cmM6bmV0cmM="}  # as requests sends from ~/.netrc
    assert server.management("GET", "/models", headers=query).status_code == 200


@pytest.mark.parametrize("name", ["Forwarded", "x-forwarded-for", "X-Forwarded-Any", "Via"])
def test_what_a_proxy_forwards_is_not_from_this_machine(server, make_archive, name):
    make_archive(server.store, "def handle(d, c):\n    return d\n", "forwarded")
    answer = server.management("POST", "/models?url=forwarded.mar", headers={name: "203.0.113.9"})
    assert (answer.status_code, answer.json()["type"]) == (403, "ForbiddenException")
    assert f"the header {name}".lower() in answer.json()["message"].lower()
    assert not server.is_known("forwarded")
    with connected(server, "management") as client:
        metadata = [(name.lower(), "203.0.113.9")]
        code, text = failure(lambda: client.call("management", "ListModels", metadata=metadata))
        assert (code, name.lower() in text) == ("PERMISSION_DENIED", True)


def own_address():
    """An address of this machine that is not loopback; no packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no network at all")
        return probe.getsockname()[0]


def test_bound_elsewhere_it_is_closed(prepare_server):
    with prepare_server() as server:
        config = server.directory / "config.properties"
        config.write_text(
            config.read_text().replace(
                "inference_address=http://127.0.0.1", "inference_address=http://0.0.0.0"
            )
        )
        server.start()
        refused = server.inference("GET", "/ping")
        assert refused.status_code == 400
        message = refused.json()["message"]
        assert message.startswith("Token Authorization failed.")
        assert "--disable-token-auth" in message
        assert "--enable-model-api" in message
        management = bearer(keys(server)["management"])
        assert server.management("GET", "/models", headers=management).status_code == 200
        for method, path in (("POST", "/models?url=m.mar"), ("DELETE", "/models/m")):
            answer = server.management(method, path, headers=management)
            assert answer.status_code == 405
            assert answer.json()["type"] == "MethodNotAllowedException"
        server.stop()
        assert not (server.directory / "key_file.json").exists()


def test_a_closed_model_api(start_server, handlers, make_archive):
    with start_server("--models", "all", enable_model_api="false") as server:
        for method, path in (("POST", "/models?url=m.mar"), ("DELETE", "/models/m")):
            assert server.management(method, path).status_code == 405
        assert server.management("GET", "/models").status_code == 200


def test_the_flags_open_what_the_file_closes(start_server):
    closed = {"enable_model_api": "false", "disable_token_authorization": "false"}
    flags = ("--disable-token-auth", "--enable-model-api")
    with start_server(*flags, **closed) as server:
        assert server.inference("GET", "/ping").status_code == 200
        assert server.register("no.mar").status_code == 404


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Host": "evil.example"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Origin": "null"},
    ],
)
def test_a_web_page_cannot_register_models(server, headers):
    answer = server.management("POST", "/models?url=no.mar", headers=headers)
    assert answer.status_code == 403
