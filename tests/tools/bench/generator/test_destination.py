"""Where requests go."""

import ssl

import pytest

from marserve.tools.bench.errors import BenchError
from marserve.tools.bench.generator.destination import Destination


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("http://127.0.0.1:8080", "127.0.0.1:8080"),
        ("http://127.0.0.1:8080/", "127.0.0.1:8080"),
        ("https://models.example:8443", "models.example:8443"),
        ("https://[::1]:8443", "[::1]:8443"),
        ("unix:/run/inference.sock", "localhost"),
    ],
)
def test_the_host_header(url, host):
    assert Destination(url).host == host


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:8080", "ftp://a", "http://a:0", "http://a:8080/ts", "unix:relative"]
)
def test_what_is_no_address_is_told(url):
    with pytest.raises(BenchError, match=r"server|port"):
        _ = Destination(url).address


def test_tls_is_for_https():
    assert Destination("http://a:1").tls() is None
    assert Destination("unix:/a").tls() is None
    checked = Destination("https://a:1").tls()
    assert checked is not None
    assert checked.verify_mode is ssl.CERT_REQUIRED
    believed = Destination("https://a:1", verify=False).tls()
    assert believed is not None
    assert believed.verify_mode is ssl.CERT_NONE


def test_certificates_that_cannot_be_used_are_told(tmp_path):
    file = tmp_path / "ca.pem"
    with pytest.raises(BenchError, match=r"file .*ca\.pem with certificates does not exist"):
        Destination("https://a:1", ca_file=str(file)).tls()
    file.write_text("nonsense")
    with pytest.raises(BenchError, match=r"ca\.pem contains no certificates"):
        Destination("https://a:1", ca_file=str(file)).tls()
