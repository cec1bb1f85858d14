"""Archives from elsewhere, registered at a real server."""

import concurrent.futures
import contextlib
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from object_store import KEY, SECRET, signature_problem

pytestmark = pytest.mark.integration

HANDLER = "def handle(d, c):\n    return d and ['from s3'] * len(d)\n"


def test_a_silent_peer_does_not_hold_up_the_end(start_server, background, wait_for):
    with socket.create_server(("127.0.0.1", 0)) as silent, start_server() as server:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/m.mar"
        registration = background(server.register, url)
        peer, _ = silent.accept()
        with peer:
            assert peer.recv(65536).startswith(b"GET /m.mar")
            peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nP")
            began = time.monotonic()
            server.stop()
            assert time.monotonic() - began < 5
        with contextlib.suppress(OSError):
            assert registration.result().status_code == 503
        assert list(server.store.iterdir()) == []


class _Stalling(BaseHTTPRequestHandler):
    """Begins to send an archive, and then sends nothing more."""

    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        self.wfile.write(b"P")
        self.server.stalled.release()
        self.rfile.read(1)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def stalling():
    """A server whose downloads stall: its address, and a semaphore that counts them."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Stalling) as server:
        server.daemon_threads = True
        server.block_on_close = False
        server.stalled = threading.Semaphore(0)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", server.stalled
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("count", [6, 60])
def test_downloads_that_stall_hold_up_no_other_change(
    start_server, background, stalling, make_archive, count
):
    url, stalled = stalling
    with start_server(max_downloads="8") as server:
        server.install(HANDLER, "other")
        for number in range(count):
            background(server.register, f"{url}/m{number}.mar")
        for _ in range(min(count, 8)):
            assert stalled.acquire(timeout=10)
        began = time.monotonic()
        server.install(HANDLER, "good")
        here = make_archive(server.directory, HANDLER, "here")
        assert server.register(f"file://{here}").status_code == 200
        assert server.describe("good")["workers"]
        scaling = server.management("PUT", "/models/other?min_worker=2&synchronous=true")
        assert scaling.status_code == 200, scaling.text
        assert server.management("DELETE", "/models/good").status_code == 200
        assert time.monotonic() - began < 5
        server.stop()


def test_more_downloads_than_may_wait_are_refused(start_server, background, stalling):
    url, stalled = stalling
    with start_server(max_downloads="1") as server:
        answers = [background(server.register, f"{url}/m{number}.mar") for number in range(102)]
        assert stalled.acquire(timeout=10)
        done = wait_any(answers).result()
        assert (done.status_code, done.json()["message"]) == (
            503,
            "1 archives are being downloaded (max_downloads) and 100 more wait; try again later.",
        )
        server.stop()


def wait_any(answers):
    done, _ = concurrent.futures.wait(answers, 20, concurrent.futures.FIRST_COMPLETED)
    return done.pop()


def test_a_download_that_trickles_is_given_up_after_its_time(start_server, stalling):
    url, _ = stalling
    with start_server(download_timeout="0.5") as server:
        answer = server.register(f"{url}/m.mar")
        failed = f"Failed to download archive from: {url}/m.mar: it takes too long."
        assert answer.json()["message"] == failed
        server.wait_logged("ts_log.log", "m.mar failed: it takes too long")
        assert list(server.store.iterdir()) == []


def test_a_url_that_an_earlier_run_has_downloaded_was_refused(
    prepare_server, tmp_path, make_archive
):
    """Containers that are started again have their model store, and no model without this."""
    archive = make_archive(tmp_path, HANDLER, "kept")
    with prepare_server(default_workers_per_model="1") as server:
        server.start()
        assert server.register(f"file://{archive}", initial_workers=1).status_code == 200
        server.stop()
        assert (server.store / "kept.mar").is_file()
        server.start("--no-config-snapshots")
        server.wait_ready()
        answer = server.register(f"file://{archive}", initial_workers=1)
        assert answer.status_code == 200, answer.text
        assert server.predict("kept").text == "from s3"
        server.stop()
        server.start("--no-config-snapshots", "--models", f"file://{archive}")
        server.wait_workers("kept", "READY")
        assert server.predict("kept").text == "from s3"
        assert server.inference("GET", "/ready").status_code == 200
        server.stop()


class Store(BaseHTTPRequestHandler):
    """A server of S3 that checks signatures by the book; it has one object."""

    content = b""

    def do_GET(self):
        problem = signature_problem("GET", self.path, self.headers)
        if self.path.startswith("/bucket/away.mar"):
            self._send(302, b"", Location="/bucket/my%20model.mar")
        elif problem:
            body = f"<Error><Code>{problem}</Code></Error>".encode()
            self._send(403, body, **{"x-amz-bucket-region": "eu-north-1"})
        elif self.path != "/bucket/my%20model.mar":
            self._send(404, b"<Error><Code>NoSuchKey</Code></Error>")
        else:
            self._send(200, self.content)

    def _send(self, status, body, **headers):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def s3(tmp_path_factory, make_archive):
    """The URL of a store."""
    Store.content = make_archive(tmp_path_factory.mktemp("s3"), HANDLER, "stored").read_bytes()
    with ThreadingHTTPServer(("127.0.0.1", 0), Store) as store:
        threading.Thread(target=store.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{store.server_address[1]}"
        store.shutdown()


@pytest.fixture
def with_s3(prepare_server, s3):
    """Start a server that may download from the store."""

    @contextlib.contextmanager
    def start(secret=SECRET, region="eu-north-1", **properties):
        environment = {
            "AWS_ACCESS_KEY_ID": KEY if secret else "",
            "AWS_SECRET_ACCESS_KEY": secret,
            "AWS_DEFAULT_REGION": region,
            "AWS_REGION": "",
            "AWS_SESSION_TOKEN": "",
            "AWS_ENDPOINT_URL_S3": s3,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": "/nowhere",
            "AWS_SHARED_CREDENTIALS_FILE": "/nowhere",
        }
        with prepare_server(environment, **properties) as server:
            server.start()
            yield server
            server.stop()

    return start


ANY = {"allowed_urls": "s3://.*,http://.*"}


def test_archives_in_s3(with_s3, s3):
    with with_s3(**ANY) as server:
        for url, query in (
            ("s3://bucket/my model.mar", {}),
            (f"{s3}/bucket/my%20model.mar", {"s3_sse_kms": "true"}),
        ):
            answer = server.register(url, model_name="m", initial_workers=1, **query)
            assert answer.status_code == 200, answer.text + server.console_text()
            assert server.predict("m").text == "from s3"
            assert server.management("DELETE", "/models/m").status_code == 200
        body = {"url": f"{s3}/bucket/my%20model.mar", "s3_sse_kms": True}
        assert server.management("POST", "/models", json=body).status_code == 200
        assert [path.name for path in server.store.iterdir()] == ["my%20model.mar"]


@pytest.mark.parametrize(
    ("path", "query", "reason"),
    [
        (
            "bucket/my%20model.mar",
            {},
            "403: Forbidden, AccessDenied; the bucket is in eu-north-1",
        ),
        ("bucket/gone.mar", {"s3_sse_kms": "true"}, "404: Not Found, NoSuchKey"),
        # Where a redirect leads, the signature does not go.
        ("bucket/away.mar", {"s3_sse_kms": "true"}, "403: Forbidden, AccessDenied"),
    ],
)
def test_a_store_that_refuses(with_s3, s3, path, query, reason):
    with with_s3(**ANY) as server:
        answer = server.register(f"{s3}/{path}", **query)
        assert (answer.status_code, answer.json()["type"]) == (400, "DownloadArchiveException")
        failed = f"Failed to download archive from: {s3}/{path}: HTTP Error {reason}"
        assert answer.json()["message"].startswith(failed)
        server.wait_printed(reason)
        assert list(server.store.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"secret": "wrong"}, "SignatureDoesNotMatch"),
        ({"region": "us-west-2"}, "AuthorizationHeaderMalformed; the bucket is in eu-north-1"),
    ],
)
def test_wrong_credentials(with_s3, settings, reason):
    with with_s3(**settings, **ANY) as server:
        assert server.register("s3://bucket/my model.mar").status_code == 400
        server.wait_printed(reason)
        assert "wrong" not in server.console_text()


def test_no_credentials_and_no_permission(with_s3):
    with with_s3(secret="") as server:
        answer = server.register("s3://bucket/m.mar")
        assert (answer.status_code, answer.json()["type"]) == (404, "ModelNotFoundException")
        assert answer.json()["message"].startswith("Model not found at: s3://bucket/m.mar")
        assert "allowed_urls" in answer.json()["message"]
    with with_s3(secret="", **ANY) as server:
        answer = server.register("s3://bucket/m.mar")
        assert (answer.status_code, answer.json()["type"]) == (400, "DownloadArchiveException")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "botocore"):
            assert name in answer.json()["message"]
