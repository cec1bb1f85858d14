"""What docs/security.md says of who can do what, asked of a server."""

import json
import re
from pathlib import Path

import grpc
import pytest
from grpc_client import connected

from marserve.frontend.rest.api_description import describe_listener

pytestmark = pytest.mark.integration

PAGE = (Path(__file__).parents[2] / "docs" / "security.md").read_text(encoding="utf-8")
KINDS = ("inference", "management", "API")
ECHO = "def handle(d, c):\n    return d and ['in'] * len(d)\n"


def table():
    """What each listener does for a request with no key, and with each: a text per column."""
    rows = PAGE.partition("\n| Listener | Open to anybody |")[2].splitlines()[2:5]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return {row[0]: dict(zip(("nobody", *KINDS), row[1:], strict=True)) for row in cells}


def documented(listener):
    """The requests that a listener offers, with names in the place of those in braces."""
    paths = describe_listener([listener.capitalize()], open_inference=True)["paths"]
    if listener == "management":
        del paths["/metrics"]  # served there only where inference shares the address
    offered = [(method.upper(), path) for path, methods in paths.items() for method in methods]
    return [(method, re.sub(r"\{\w+\}", "m", path)) for method, path in offered]


def is_open(rules, key, name):
    """Whether a request with this key, or with none, is answered, as the page has it."""
    if any(f"`{name}`" in rule for rule in rules.values()):
        return f"`{name}`" in rules["nobody"] + rules[key]
    return any(rule.startswith("everything") for rule in (rules["nobody"], rules[key]))


def rows(header):
    """The rows of the table with this header line, each as its cells without emphasis."""
    lines = PAGE.partition(f"\n| {header} |")[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in lines]


# Servers for each row of "which requests need a key", but for the last one, which needs a terminal:
# `test_debugging`. The number of the row, properties, arguments.
SITUATIONS = (
    (0, {"disable_token_authorization": "false"}, ()),
    (1, {"metrics_address": "http://0.0.0.0:{metrics}"}, ()),
    (2, {"token_directory": "keys"}, ()),
    (3, {}, ()),
    (4, {"disable_token_authorization": "true"}, ()),
    (4, {}, ("--platform", "sagemaker")),
)
# The headers of each row of "a request", given the key.
REQUESTS = (
    lambda _: {},
    lambda key: {"Authorization": f"Bearer {key}", "Via": "1.1 proxy"},
    lambda _: {"Authorization": "Bearer wrong"},
    lambda _: {"X-Forwarded-For": "203.0.113.9"},
    lambda _: {"Origin": "https://page.example"},
)


def key_of(server, kind, properties):
    if "token_directory" in properties:
        return f"the-key-for-{kind}"
    file = server.directory / "key_file.json"
    return json.loads(file.read_text())[kind]["key"] if file.exists() else "any"


@pytest.mark.parametrize(("row", "properties", "arguments"), SITUATIONS)
def test_which_requests_need_a_key(prepare_server, row, properties, arguments):
    _, _, *rules = rows("`disable_token_authorization` | Listeners")[row]
    verdicts = {}  # by rule, of each request
    for _, *verdict in rows("A request"):
        for rule, each in zip(("key", "local", "open"), verdict, strict=True):
            verdicts.setdefault(rule, []).append(each)
    with prepare_server() as server:
        for name, value in properties.items():
            server.write_property(name, value.format(**server.ports))
        (server.directory / "keys").mkdir()
        for kind in ("inference", "management"):
            (server.directory / "keys" / kind).write_text(f"the-key-for-{kind}")
        server.start(*arguments)
        is_written = "open" not in rules[1] and "token_directory" not in properties
        assert (server.directory / "key_file.json").exists() == is_written
        for kind, rule in zip(("inference", "management"), rules, strict=True):
            for verdict, make in zip(verdicts[rule], REQUESTS, strict=True):
                headers = make(key_of(server, kind, properties))
                status = int(verdict[:3]) if verdict[0].isdigit() else 200
                path = {"inference": "/ping", "management": "/models"}[kind]
                answer = server._request(kind, "GET", path, {"headers": headers})
                assert answer.status_code == status, (kind, headers)
                if "Origin" not in headers and "--platform" not in arguments:
                    code = "OK" if status == 200 else "PERMISSION_DENIED"
                    assert code_over_grpc(server, kind, headers) == code, headers
        server.stop()


def code_over_grpc(server, kind, headers):
    method = {"inference": "Ping", "management": "ListModels"}[kind]
    metadata = [(name.lower(), value) for name, value in headers.items()]
    with connected(server, kind) as client:
        try:
            client.call(kind, method, metadata=metadata)
        except grpc.RpcError as error:
            return error.code().name
        return "OK"


@pytest.fixture(scope="module")
def guarded(start_server):
    properties = {"disable_token_authorization": "false", "ts_open_inference_protocol": "true"}
    with start_server(**properties) as server:
        yield server


def opens(server, listener, key, request):
    """Whether a listener answers a request with this key by something else than a refusal."""
    keys = json.loads((server.directory / "key_file.json").read_text())  # renewed by a test
    headers = {} if key == "nobody" else {"Authorization": f"Bearer {keys[key]['key']}"}
    sent = {"headers": headers, "stream": True}
    with server._request(listener, *request, sent) as answer:
        if answer.headers["content-type"] == "text/event-stream":  # without end
            return True
        return '"InvalidKeyException"' not in answer.text


@pytest.mark.parametrize("listener", table())
def test_each_request_needs_the_key_that_the_page_says(guarded, listener):
    rules = table()[listener]
    offered = documented(listener)
    assert offered
    for method, path in offered:
        for key in rules:
            expected = is_open(rules, key, f"{method} {path}")
            kind = "?type=inference" if path == "/token" else ""
            assert opens(guarded, listener, key, (method, path + kind)) == expected, (path, key)


def test_who_registers_names_any_directory_and_any_handler(start_server, tmp_path):
    """What `allowed_urls` does not bound: registering is running code."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "any.py").write_text(ECHO)
    with start_server(allowed_urls="https://models.example/.*") as server:
        query = {"url": str(elsewhere), "handler": str(tmp_path / "any.py"), "model_name": "any"}
        assert server.management("POST", "/models?initial_workers=1", params=query).ok
        assert server.predict("any", data=b"x").text == "in"
        assert server.management("POST", "/models?url=file:///etc/hosts").status_code == 404


def test_a_web_page_can_ask_models_but_not_manage_them(server, install):
    name = install(handler=ECHO)
    headers = {"Host": "page.example", "Origin": "https://page.example"}
    assert server.predict(name, data=b"x", headers=headers).text == "in"
    assert server.management("GET", "/models", headers=headers).status_code == 403


def test_unpacked_models_are_for_the_servers_user_only(server, install):
    install(handler=ECHO)
    (work,) = server.temp.glob("marserve-*")
    assert work.stat().st_mode & 0o077 == 0


def test_without_the_model_api_models_are_described_scaled_and_logged_but_not_registered(
    start_server, make_archive
):
    with start_server(enable_model_api="false", load_models="all") as server:
        make_archive(server.store, ECHO, "m")
        assert server.register("m.mar").status_code == 405
        server.stop()
        server.start()
        assert server.describe("m")["workers"]
        assert server.management("PUT", "/models/m?min_worker=0&synchronous=true").ok
        assert server.management("PUT", "/models/m?batch_size=2").ok
        assert server.management("PUT", "/loggers/root?level=debug").ok
        assert server.management("DELETE", "/models/m").status_code == 405
