import pytest

from marserve.frontend.errors import ForeignOrigin
from marserve.frontend.http.origin import refuse_foreign_origin


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Host": "localhost:8081"},
        {"Host": "127.0.0.1:8081"},
        {"Host": "[::1]:8081"},
        {"Host": "models.localhost"},
        {"Host": "localhost:8081", "Origin": "http://localhost:8081"},
        {"Host": "localhost:8081", "Sec-Fetch-Site": "none"},
        {"Host": "localhost:8081", "Sec-Fetch-Site": "same-origin"},
    ],
)
def test_programs_of_this_machine_pass(headers: dict[str, str]) -> None:
    refuse_foreign_origin(headers)


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example:8081"},
        {"Host": "10.0.0.7:8081"},
        {"Host": "localhost.evil.example"},
        {"Host": "localhost:8081", "Origin": "http://evil.example"},
        {"Host": "localhost:8081", "Origin": "null"},
        {"Host": "localhost:8081", "Origin": "http://localhost:3000"},
        {"Host": "localhost:8081", "Sec-Fetch-Site": "cross-site"},
        {"Host": "localhost:8081", "Sec-Fetch-Site": "same-site"},
        {"Host": "[not an address"},
    ],
)
def test_web_pages_are_refused(headers: dict[str, str]) -> None:
    with pytest.raises(ForeignOrigin):
        refuse_foreign_origin(headers)
