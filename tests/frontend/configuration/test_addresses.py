from pathlib import Path

import pytest

from marserve.frontend.configuration.addresses import (
    KEYSTORE_TYPE,
    Address,
    UnixAddress,
    check_schemes,
    listener_address,
)

parse = listener_address(80, 443).from_text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("http://0.0.0.0", Address("0.0.0.0", 80)),
        ("https://0.0.0.0", Address("0.0.0.0", 443, "https")),
        ("HTTPS://Box.local:8443", Address("box.local", 8443, "https")),
        ("http://[::1]:0", Address("::1", 0)),
        ("https://[0::1]", Address("::1", 443, "https")),
        ("unix:/tmp/s", UnixAddress(Path("/tmp/s"))),
        ("UNIX:///tmp/a b", UnixAddress(Path("/tmp/a b"))),
        ("unix:/" + "p" * 106, UnixAddress(Path("/" + "p" * 106))),
    ],
)
def test_an_address_is_read(text, expected):
    assert parse(text) == expected


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("127.0.0.1:8080", "http://host"),
        ("ftp://127.0.0.1", "http://host"),
        ("http://127.0.0.1/", "http://host"),
        ("https://", "http://host"),
        ("https://127.0.0.1:65536", "a port from 0 to 65535"),
        ("https://127.0.0.1:", "a port from 0 to 65535"),
        ("http://127.0.0.1:http", "a port from 0 to 65535"),
        ("http://[::g]", "an IPv6 address"),
        ("unix:relative", "unix:/path"),
        ("unix://relative/x", "unix:/path"),
        ("unix:", "unix:/path"),
        ("unix:/nul\0", "unix:/path"),
        ("unix:/" + "é" * 54, "a path of at most 107 bytes"),
    ],
)
def test_what_is_no_address_is_refused(text, allowed):
    with pytest.raises(ValueError, match=allowed):
        parse(text)


@pytest.mark.parametrize(
    ("host", "is_private"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("LocalHost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("localhost.example.com", False),
        ("127.1", False),
    ],
)
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_only_what_is_surely_loopback_counts_as_private(host, scheme, is_private):
    assert Address(host, 1, scheme).is_private is is_private


def test_a_unix_socket_is_private():
    assert UnixAddress(Path("/s")).is_private


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1:8080", "https://[::1]:8080", "unix:/tmp/socket"],
)
def test_an_address_shows_as_it_was_written(url):
    assert parse(url).url == url


@pytest.mark.parametrize("port", [0, 1])
@pytest.mark.parametrize("host", ["a", "b"])
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_only_one_fixed_address_cannot_speak_two_schemes(host, port, scheme):
    addresses = [UnixAddress(Path("/s")), Address("a", port), Address(host, port, scheme)]
    if (host, port, scheme) == ("a", 1, "https"):
        with pytest.raises(ValueError, match=r"^http://a:1 and https://a:1 cannot both be served$"):
            check_schemes(addresses)
    else:
        check_schemes(addresses)


def test_the_types_of_key_stores():
    assert (KEYSTORE_TYPE.from_text("pkcs12"), KEYSTORE_TYPE.from_text("JKS")) == ("PKCS12", "JKS")
    with pytest.raises(ValueError, match="PKCS12"):
        KEYSTORE_TYPE.from_text("BKS")
