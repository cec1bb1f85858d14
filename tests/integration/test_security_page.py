"""What docs/security.md says of who can do what, asked of a server."""

import json
import re
from pathlib import Path

import pytest

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


@pytest.fixture(scope="module")
def guarded(start_server):
    properties = {"disable_token_authorization": "false", "ts_open_inference_protocol": "true"}
    with start_server(**properties) as server:
        yield server


def opens(server, listener, key, request):
    """Whether a listener answers a request with this key by something else than a refusal."""
    keys = json.loads((server.directory / "key_file.json").read_text())  # renewed by a test
    headers = {} if key == "nobody" else {"Authorization": f"Bearer {keys[key]['key']}"}
    answer = server._request(listener, *request, {"headers": headers})
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
