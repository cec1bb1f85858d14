import pytest

from marserve.frontend.errors import ForeignOrigin
from marserve.frontend.http.authentication import Guard


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
    ],
)
def test_programs_of_this_machine_pass(headers: dict[str, str]) -> None:
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
    ],
)
def test_web_pages_are_refused(headers: dict[str, str]) -> None:
    with pytest.raises(ForeignOrigin):
        Guard(None, local=["management"]).admit("management", headers)
