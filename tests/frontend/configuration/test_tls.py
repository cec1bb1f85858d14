"""Handshakes in memory: no socket, no server."""

import contextlib
import os
import re
import ssl
import sys
from pathlib import Path

import pytest
from certificates import PASSWORD, Authority, make_authority, make_pair
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, pkcs12

from marserve.frontend.configuration.addresses import TlsFiles
from marserve.frontend.configuration.properties import ConfigError
from marserve.frontend.configuration.tls import server_context

NOTHING = TlsFiles(None, PASSWORD, None, None)


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return make_authority(tmp_path_factory.mktemp("authority"))


def pem(authority: Authority, key: str = "key.pem", certificate: str = "chain.pem") -> TlsFiles:
    return TlsFiles(None, PASSWORD, authority.folder / key, authority.folder / certificate)


def store(path: Path, password: str = PASSWORD) -> TlsFiles:
    return TlsFiles(path, password, None, None)


def client_context(root: str | None = None, cadata: str | None = None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(root, cadata=cadata)
    return context


def connect(server: ssl.SSLContext, client: ssl.SSLContext, name: str) -> ssl.SSLObject:
    """The client's end after a handshake."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = server.wrap_bio(to_server, to_client, server_side=True)
    theirs = client.wrap_bio(to_client, to_server, server_hostname=name)
    for side in (theirs, ours, theirs, ours, theirs):
        with contextlib.suppress(ssl.SSLWantReadError):
            side.do_handshake()
    return theirs


def shake_hands(server: ssl.SSLContext, client: ssl.SSLContext, name: str = "localhost") -> str:
    """The version that both agree on."""
    return connect(server, client, name).version() or ""


@pytest.mark.parametrize("key", ["key.pem", "key1.pem"])
def test_pem_files_with_a_key_of_either_form(authority, key):
    server = server_context(pem(authority, key))
    assert shake_hands(server, client_context(authority.root)) == "TLSv1.3"


def test_a_key_store_and_its_chain(authority):
    server = server_context(store(authority.folder / "store.p12"))
    assert shake_hands(server, client_context(authority.root), "127.0.0.1") == "TLSv1.3"


def test_a_key_store_goes_before_pem_files(authority):
    files = TlsFiles(authority.folder / "store.p12", PASSWORD, Path("/nowhere"), Path("/nowhere"))
    assert shake_hands(server_context(files), client_context(authority.root))


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "::1"])
def test_without_files_the_server_vouches_for_itself(name):
    server = server_context(NOTHING)
    distrustful = ssl.create_default_context()
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(server, distrustful, name)
    careless = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    careless.check_hostname = False
    careless.verify_mode = ssl.CERT_NONE
    der = connect(server, careless, name).getpeercert(binary_form=True)
    assert der is not None
    certificate = ssl.DER_cert_to_PEM_cert(der)
    assert shake_hands(server, client_context(cadata=certificate), name) == "TLSv1.3"


def test_tls_1_2_is_the_oldest(authority):
    server = server_context(pem(authority))
    old = client_context(authority.root)
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    assert shake_hands(server, old) == "TLSv1.2"
    assert server.minimum_version == ssl.TLSVersion.TLSv1_2


def test_no_key_is_left_in_a_file(authority, tmp_path):
    before = set(Path("/proc/self/fd").iterdir())
    server_context(store(authority.folder / "store.p12"))
    server_context(NOTHING)
    assert set(Path("/proc/self/fd").iterdir()) == before


@pytest.mark.parametrize(
    ("key", "certificate", "sentence"),
    [
        ("gone.pem", "chain.pem", r"Cannot read .*gone\.pem: No such file"),
        ("key.pem", "gone.pem", r"Cannot read .*gone\.pem: No such file"),
        ("key.pem", "other.pem", "cannot be used: KEY_VALUES_MISMATCH"),
        ("chain.pem", "chain.pem", "cannot be used: "),
        ("store.p12", "chain.pem", "cannot be used: "),
        ("key.pem", "key.pem", "cannot be used: "),
        ("locked.pem", "chain.pem", r"locked\.pem is encrypted"),
    ],
)
def test_pem_files_that_are_of_no_use(authority, key, certificate, sentence):
    with pytest.raises(ConfigError, match=sentence):
        server_context(pem(authority, key, certificate))


@pytest.mark.timeout(20)
def test_a_pipe_is_not_read(authority, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for files in (store(pipe), TlsFiles(None, PASSWORD, pipe, authority.folder / "chain.pem")):
        with pytest.raises(ConfigError, match=f"Cannot read {pipe}: it is no file"):
            server_context(files)


@pytest.mark.parametrize("count", [0, 1])
def test_one_pem_file_alone_is_not_used(authority, count):
    paths = [None, None]
    paths[count] = authority.folder / "key.pem"
    files = TlsFiles(None, PASSWORD, *paths)
    assert not files.are_configured
    server_context(files)  # with what it makes up


def test_a_key_of_too_few_bits_is_reported_with_the_way_to_a_new_one(tmp_path):
    weak = make_pair("weak", bits=1024)
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    key.write_bytes(weak.key_pem())
    certificate.write_bytes(weak.certificate_pem())
    library = re.escape(" ".join(ssl.OPENSSL_VERSION.split()[:2]))
    sentence = (
        rf"cannot be used: the key has fewer bits than the TLS library \({library}\) takes\. "
    )
    with pytest.raises(ConfigError, match=f"{sentence}Make a new one: openssl req -x509 "):
        server_context(TlsFiles(None, PASSWORD, key, certificate))

    content = pkcs12.serialize_key_and_certificates(
        b"weak", weak.key, weak.certificate, None, BestAvailableEncryption(PASSWORD.encode())
    )
    (tmp_path / "store.p12").write_bytes(content)
    with pytest.raises(ConfigError, match=f"{sentence}Make a new one: keytool -genkeypair "):
        server_context(store(tmp_path / "store.p12"))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"\xfe\xed\xfe\xed\0\0\0\2", "is a Java key store .* keytool -importkeystore"),
        (b"\xce\xce\xce\xce\0\0\0\2", "is a Java key store .* keytool -importkeystore"),
        (b"", "cannot be used: .* PKCS12"),
        (b"nonsense", "cannot be used: .* PKCS12"),
    ],
)
def test_what_is_no_pkcs12(tmp_path, content, sentence):
    (tmp_path / "store.jks").write_bytes(content)
    with pytest.raises(ConfigError, match=sentence):
        server_context(store(tmp_path / "store.jks"))


@pytest.mark.parametrize("password", ["wrong", ""])
def test_a_wrong_password(authority, password):
    with pytest.raises(ConfigError, match="with keystore_pass"):
        server_context(store(authority.folder / "store.p12", password))


def test_a_missing_library_is_named(authority, monkeypatch):
    for name in [each for each in sys.modules if each.startswith("cryptography")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    monkeypatch.delitem(sys.modules, "marserve.frontend.configuration.certificates", raising=False)
    monkeypatch.delattr("marserve.frontend.configuration.certificates", raising=False)
    server_context(pem(authority))  # needs nothing
    for files in (store(authority.folder / "store.p12"), NOTHING):
        with pytest.raises(ConfigError, match=r"needs the package cryptography: pip install"):
            server_context(files)
