import json
from contextlib import nullcontext

import pytest

from marserve.frontend.errors import ForeignOrigin, InvalidToken
from marserve.frontend.security.guard import Guard
from marserve.frontend.security.tokens import TokenStore


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"host": "localhost:8081"},
        {"host": "127.0.0.1:8081"},
        {"host": "[::1]:8081"},
        {"host": "models.localhost"},
        {"host": "localhost:8081", "origin": "http://localhost:8081"},
        {"host": "localhost:8081", "sec-fetch-site": "none"},
        {"host": "localhost:8081", "sec-fetch-site": "same-origin"},
        {"x-forward": "no", "x-real-ip-of": "no", "vial": "no"},
    ],
)
def test_programs_of_this_machine_pass(headers):
    Guard(None, local=["management"]).admit("management", headers)


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example:8081"},
        {"host": "10.0.0.7:8081"},
        {"host": "localhost.evil.example"},
        {"host": "localhost:8081", "origin": "http://evil.example"},
        {"host": "localhost:8081", "origin": "null"},
        {"host": "localhost:8081", "origin": "http://localhost:3000"},
        {"host": "localhost:8081", "sec-fetch-site": "cross-site"},
        {"host": "localhost:8081", "sec-fetch-site": "same-site"},
        {"host": "[not an address"},
        {"forwarded": "for=203.0.113.9"},
        {"X-Forwarded-For": "203.0.113.9"},
        {"x-forwarded-": ""},
        {"X-Real-IP": "203.0.113.9"},
        {"via": "1.1 proxy"},
    ],
)
def test_web_pages_and_proxies_are_refused(headers):
    with pytest.raises(ForeignOrigin):
        Guard(None, local=["management"]).admit("management", headers)


@pytest.fixture
def tokens(tmp_path):
    store = TokenStore(tmp_path / "key_file.json", 60.0)
    store.write()
    return store


@pytest.mark.parametrize("kind", ["inference", "management"])
def test_a_key_that_is_not_needed_is_checked_on_management_only(kind, tokens):
    guard = Guard(tokens, keyless=True, local=["management"])
    key = json.loads(tokens.path.read_text())[kind]["key"]
    guard.admit(kind, {})
    guard.admit(kind, {"authorization": "Basic of-a-netrc-file"})
    guard.admit(kind, {"authorization": f"Bearer {key}", "host": "elsewhere", "via": "1.1 proxy"})
    expected = pytest.raises(InvalidToken) if kind == "management" else nullcontext()
    for wrong in ("Bearer wrong", "bearer wrong", "Bearer"):
        with expected:
            guard.admit(kind, {"authorization": wrong})


def test_without_browsers_only_forwarding_headers_are_foreign():
    guard = Guard(None, local=["management"], browsers=False)
    guard.admit("management", {"host": "any", "origin": "http://any"})
    with pytest.raises(ForeignOrigin, match="x-real-ip"):
        guard.admit("management", {"x-real-ip": "203.0.113.9"})
