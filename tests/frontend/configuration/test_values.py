import pytest

from marserve.frontend.configuration.values import without_secrets


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://user:pa55@host/m.mar?sig=1#part", "https://host/m.mar"),
        ("http://a:80 (b@c)", "http://a:80 (b@c)"),
        ("GET http://a failed, mail ops@example.org", "GET http://a failed, mail ops@example.org"),
        ("http://one\nhttps://u:p@two\nx@three", "http://one\nhttps://two\nx@three"),
    ],
)
def test_the_secrets_of_a_url_end_with_it(text, shown):
    assert without_secrets(text) == shown
