"""Where objects lie, and what becomes of the token of a machine that has none."""

import socket
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from marserve.frontend.archives.google_storage import authorised_request
from marserve.frontend.errors import ModelNotFound

NO_MACHINE = {"GCE_METADATA_HOST": "127.0.0.1:1"}


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("gs://b/k.mar", "https://storage.googleapis.com/b/k.mar"),
        ("GS://b.c/d e/ü%2b", "https://storage.googleapis.com/b.c/d%20e/%C3%BC%2B"),
    ],
)
def test_an_object_is_asked_for_without_a_token_where_nobody_gives_one(url, place):
    assert authorised_request(url, NO_MACHINE) == (place, {})


@pytest.mark.parametrize("endpoint", ["http://h:4443/", "h:4443"])
def test_another_server_may_have_it(endpoint):
    environ = {**NO_MACHINE, "STORAGE_EMULATOR_HOST": endpoint}
    assert authorised_request("gs://b/k", environ)[0] == "http://h:4443/b/k"


@pytest.mark.parametrize("url", ["gs://b", "gs://b/", "gs:///k", "gs://a@b/k"])
def test_what_names_no_object_is_not_found(url):
    with pytest.raises(ModelNotFound):
        authorised_request(url, NO_MACHINE)


@pytest.mark.parametrize("answer", [b"[" * 60_000, b'{"access_token": %b}' % (b"9" * 5000), b"[1]"])
def test_a_metadata_server_that_sends_no_token(answer):
    class Metadata(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Metadata-Flavor", "Google")
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Metadata) as server:
        threading.Thread(target=server.handle_request).start()
        environ = {"GCE_METADATA_HOST": f"127.0.0.1:{server.server_port}"}
        assert authorised_request("gs://b/k", environ)[1] == {}


@pytest.mark.parametrize(
    "start", [b"HTTP/1.1 200 ", b"HTTP/1.1 200 OK\r\nMetadata-Flavor: Google\r\n\r\n"]
)
def test_a_metadata_server_that_drips_does_not_hold_the_download(start):
    def drip():
        with suppress(OSError), sock.accept()[0] as connection:
            connection.sendall(start)
            while True:
                connection.sendall(b"x")
                time.sleep(0.1)

    with socket.create_server(("127.0.0.1", 0)) as sock:
        threading.Thread(target=drip, daemon=True).start()
        began = time.monotonic()
        environ = {"GCE_METADATA_HOST": f"127.0.0.1:{sock.getsockname()[1]}"}
        assert authorised_request("gs://b/k", environ)[1] == {}
        assert time.monotonic() - began < 10
