"""https listeners: real handshakes with a real server."""

import contextlib
import json
import resource
import shutil
import signal
import ssl
import subprocess
from pathlib import Path

import psutil
import pytest
import requests
from certificates import make_authority, make_pair
from servers import free_ports

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:Unverified HTTPS request"),
]


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return make_authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def start_secure(prepare_server, wait_for):
    """Start a server whose listeners all speak https, and stop it well."""

    @contextlib.contextmanager
    def start(**properties):
        with prepare_server() as server:
            addresses = {
                f"{name}_address": f"https://127.0.0.1:{port}"
                for name, port in server.ports.items()
            }
            for key, value in {**addresses, **properties}.items():
                server.write_property(key, value)
            server.launch()
            wait_for(
                lambda: "Model server started." in server.console_text() or not server.is_running,
                what=server.console_text,
            )
            assert server.is_running, server.console_text()
            yield server
            if server.is_running:
                server.stop()

    return start


@pytest.fixture(scope="module")
def secure(start_secure, authority):
    """A server with a PEM identity that several tests share; its clients have a second."""
    identity = {
        "private_key_file": authority.file("key1.pem"),
        "certificate_file": authority.file("chain.pem"),
    }
    with start_secure(**identity, request_head_timeout="1") as server:
        yield server


def url(server, listener, path="", host="localhost"):
    return f"https://{host}:{server.ports[listener]}{path}"


def test_everything_works_over_tls(secure, authority, make_archive):
    for listener in ("inference", "management", "metrics"):
        place = url(secure, listener, host="127.0.0.1")
        secure.wait_printed(f"{listener.capitalize()} API bind to: {place}\n")
    make_archive(secure.store, "def handle(d, c):\n    return d and [x['body'] for x in d]\n", "m")
    with requests.Session() as session:
        session.trust_env, session.verify = False, authority.root
        parameters = {"url": "m.mar", "initial_workers": 1}
        answer = session.post(url(secure, "management", "/models"), params=parameters, timeout=20)
        assert answer.status_code == 200, answer.text
        body = bytes(range(256)) * 10_000
        for _ in range(3):
            answer = session.post(url(secure, "inference", "/predictions/m"), body, timeout=20)
            assert answer.content == body
        text = session.get(url(secure, "metrics", "/metrics"), timeout=20).text
        assert "ts_inference_requests_total" in text
    secure.wait_logged("access_log.log", "/127.0.0.1:")


def test_an_untrusted_server_is_noticed(secure):
    with pytest.raises(requests.exceptions.SSLError):
        requests.get(url(secure, "inference", "/ping"), timeout=20)


def test_a_client_that_speaks_no_tls_harms_nobody(secure, authority, wait_for):
    with secure.connect("inference") as plain:
        plain.sendall(b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            assert b"Healthy" not in plain.recv(65536)
    answer = requests.get(url(secure, "inference", "/ping"), verify=authority.root, timeout=20)
    assert answer.json() == {"status": "Healthy"}


def test_a_client_that_does_not_greet_is_sent_away(secure):
    with secure.connect("inference") as silent:
        assert silent.recv(1) == b""


def test_clients_that_do_not_greet_leave_descriptors_to_other_listeners(
    start_secure, authority, wait_for
):
    # They stay until the server has stopped, which takes no longer because of them.
    with contextlib.ExitStack() as flood, start_secure() as server:
        process = psutil.Process(server.process.pid)
        limit = process.num_fds() + 160
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (limit, limit))
        for _ in range(300):
            flood.enter_context(server.connect("inference"))
        wait_for(lambda: "file descriptors run short (ulimit -n)" in server.console_text())
        models = requests.get(url(server, "management", "/models"), verify=False, timeout=20)
        assert models.status_code == 200
        assert process.num_fds() < limit - 20


def test_a_handshake_counts_as_a_connection(start_secure, wait_for):
    with start_secure(max_connections="1") as server:

        def stays():
            """A client that is let in, and does not greet."""
            client = server.connect("inference")
            client.settimeout(0.5)
            with contextlib.suppress(TimeoutError, ConnectionError):
                client.recv(1)
                client.close()
                return None
            return client

        first = wait_for(stays)
        with first, server.connect("inference") as second:
            assert second.recv(1) == b""
        assert wait_for(lambda: answers(server))


def answers(server):
    try:
        place = url(server, "inference", "/ping")
        return requests.get(place, verify=False, timeout=20).status_code == 200
    except OSError:
        return False


def test_a_client_that_greets_and_then_says_nothing_is_sent_away(secure, authority):
    context = ssl.create_default_context(cafile=authority.root)
    with (
        secure.connect("inference") as connection,
        context.wrap_socket(connection, server_hostname="localhost") as silent,
    ):
        assert silent.recv(1) == b""


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_versions(secure, authority, version):
    context = ssl.create_default_context(cafile=authority.root)
    context.minimum_version = context.maximum_version = version
    with (
        secure.connect("inference") as connection,
        context.wrap_socket(connection, server_hostname="localhost") as secured,
    ):
        assert secured.version() == version.name.replace("_", ".").replace("TLSv1.", "TLSv1.")
        secured.sendall(b"GET /ping HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert secured.recv(65536).startswith(b"HTTP/1.1 200")


def test_a_key_store_and_one_shared_address(start_secure, authority):
    with start_secure(keystore=authority.file("store.p12")) as server:
        server_url = url(server, "inference", "/ping")
        assert requests.get(server_url, verify=authority.root, timeout=20).status_code == 200
    shared = {"keystore": authority.file("store.p12")}
    (port,) = free_ports(1)
    for name in ("inference", "management", "metrics"):
        shared[f"{name}_address"] = f"https://127.0.0.1:{port}"
    with start_secure(**shared) as server:
        place = f"https://127.0.0.1:{port}"
        banner = f"Inference and Management and Metrics API bind to: {place}\n"
        server.wait_printed(banner)
        for path in ("/ping", "/models", "/metrics"):
            answer = requests.get(f"{place}{path}", verify=authority.root, timeout=20)
            assert answer.status_code == 200


def test_sighup_reads_renewed_certificates(start_secure, authority, tmp_path):
    files = {"private_key_file": tmp_path / "key.pem", "certificate_file": tmp_path / "chain.pem"}

    def renew(key, chain):
        files["private_key_file"].write_bytes(key)
        files["certificate_file"].write_bytes(chain)

    renew(*(Path(authority.file(name)).read_bytes() for name in ("key1.pem", "chain.pem")))
    with start_secure(**{key: str(path) for key, path in files.items()}) as server:
        place = ("127.0.0.1", server.ports["inference"])
        first = ssl.get_server_certificate(place)
        renewed = make_pair("renewed")
        renew(b"no key", renewed.certificate_pem())
        server.terminate(signal.SIGHUP)
        server.wait_logged("ts_log.log", "[ERROR] reload marserve.frontend.server - SIGHUP: ")
        assert ssl.get_server_certificate(place) == first
        renew(renewed.key_pem(), renewed.certificate_pem())
        server.terminate(signal.SIGHUP)
        server.wait_logged("ts_log.log", "SIGHUP: the certificates were read again.")
        assert ssl.get_server_certificate(place) == renewed.certificate_pem().decode()


def test_without_files_it_vouches_for_itself(start_secure):
    with start_secure() as server:
        server.wait_printed("https uses a self-signed certificate")
        place = ("127.0.0.1", server.ports["management"])
        certificate = ssl.get_server_certificate(place)
        (server.directory / "pinned.pem").write_text(certificate)
        pinned = str(server.directory / "pinned.pem")
        answer = requests.get(url(server, "management", "/models"), verify=pinned, timeout=20)
        assert answer.json() == {"models": []}
        if curl := shutil.which("curl"):
            command = [curl, "-sk", "--max-time", "20", url(server, "inference", "/ping")]
            answered = subprocess.run(command, capture_output=True, check=True)
            assert json.loads(answered.stdout) == {"status": "Healthy"}


def test_a_mistake_is_told_where_the_command_was_typed(prepare_server, authority):
    with prepare_server() as server:
        server.write_property("inference_address", "https://127.0.0.1:1")
        server.write_property("keystore", authority.file("store.p12"))
        server.write_property("keystore_pass", "wrong")
        assert server.launch().wait(20) == 1
        server.wait_printed("with keystore_pass")
        assert "Traceback" not in server.console_text()
