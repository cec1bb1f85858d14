"""The identity of listeners with TLS, 1.2 or newer: a key and certificates.

They are from a PKCS #12 key store, else from two PEM files, else generated for the life of the
server. All but PEM needs the package ``cryptography``.
"""

import os
import ssl
from pathlib import Path
from types import ModuleType

from marserve.frontend.configuration.addresses import TlsFiles
from marserve.frontend.configuration.properties import ConfigError
from marserve.frontend.regular_files import read_file

# The first bytes of Java's formats.
_JAVA_KEYSTORES = (b"\xfe\xed\xfe\xed", b"\xce\xce\xce\xce")

# OpenSSL's reasons to refuse keys that Java accepts.
_TOO_WEAK = {
    "EE_KEY_TOO_SMALL": "the key has fewer bits than",
    "CA_KEY_TOO_SMALL": "the key of an authority in the chain has fewer bits than",
    "CA_MD_TOO_WEAK": "a certificate in the chain has a weaker signature than",
}
_NEW_PEM = (
    "openssl req -x509 -newkey rsa:3072 -nodes -days 365 -keyout key.pem -out certificate.pem "
    "-subj /CN=localhost -addext subjectAltName=DNS:localhost,IP:127.0.0.1"
)
_NEW_KEYSTORE = (
    "keytool -genkeypair -keyalg RSA -keysize 3072 -validity 365 -storetype PKCS12 -keystore "
    "keystore.p12 -dname CN=localhost -ext SAN=dns:localhost,ip:127.0.0.1"
)


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """Return the context of a listener.

    Raises:
        ConfigError: The files cannot be used, or a package is missing.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    _load(context, files)
    return context


def identity_pem(files: TlsFiles) -> tuple[bytes, bytes]:
    """Return the private key, and the certificates, as PEM.

    Raises:
        ConfigError: The files cannot be used, or a package is missing.
    """
    server_context(files)  # its errors are the best
    if files.keystore is not None:
        certificates = _certificates(f"keystore={files.keystore}")
        pem: bytes = certificates.keystore_pem(_read(files.keystore), files.keystore_pass)
    elif files.private_key_file and files.certificate_file:
        return _read(files.private_key_file), _read(files.certificate_file)
    else:
        pem = _certificates("TLS without a certificate").self_signed_pem()
    return pem, pem  # each reader finds its part


def load_identity(context: ssl.SSLContext, files: TlsFiles) -> None:
    """Load key and certificates again, for new connections.

    Raises:
        ConfigError: They cannot be used; the context keeps what it has.
    """
    server_context(files)  # a failure half-way is in this context
    _load(context, files)


def _load(context: ssl.SSLContext, files: TlsFiles) -> None:
    if files.keystore is not None:
        _load_keystore(context, files.keystore, files.keystore_pass)
    elif files.private_key_file and files.certificate_file:
        _load_pem(context, files.private_key_file, files.certificate_file)
    else:
        reason = "https without keystore, or private_key_file and certificate_file,"
        _load_bytes(context, _certificates(reason).self_signed_pem())


def _load_pem(context: ssl.SSLContext, key: Path, certificate: Path) -> None:
    for path in (key, certificate):
        _read(path)  # ssl does not say which file is missing

    def no_password() -> str:  # without it ssl would ask at the terminal
        raise ConfigError(f"private_key_file={key} is encrypted; decrypt it, or use a keystore.")

    try:
        context.load_cert_chain(certificate, key, no_password)
    except ssl.SSLError as error:
        raise ConfigError(
            f"private_key_file={key} and certificate_file={certificate} cannot be used: "
            f"{_too_weak(error, _NEW_PEM) or error.reason or 'no PEM'}"
        ) from error


def _load_keystore(context: ssl.SSLContext, path: Path, password: str) -> None:
    content = _read(path)
    if content.startswith(_JAVA_KEYSTORES):
        raise ConfigError(
            f"keystore={path} is a Java key store (JKS); convert it: keytool -importkeystore "
            f"-srckeystore {path} -destkeystore {path.stem}.p12 -deststoretype PKCS12"
        )
    certificates = _certificates(f"keystore={path}")
    try:
        _load_bytes(context, certificates.keystore_pem(content, password))
    except (ValueError, ssl.SSLError) as error:
        reason = f"{error}; it must be PKCS12, with keystore_pass."
        weak = _too_weak(error, _NEW_KEYSTORE)
        raise ConfigError(f"keystore={path} cannot be used: {weak or reason}") from error


def _too_weak(error: Exception, command: str) -> str:
    """Return a sentence about a key or signature that is too weak; else an empty text."""
    reason = error.reason if isinstance(error, ssl.SSLError) else None
    if reason not in _TOO_WEAK:
        return ""
    library = " ".join(ssl.OPENSSL_VERSION.split()[:2])
    return f"{_TOO_WEAK[reason]} the TLS library ({library}) takes. Make a new one: {command}"


def _load_bytes(context: ssl.SSLContext, pem: bytes) -> None:
    """Load key and certificates, which ``ssl`` reads from files only, from one in memory."""
    with open(os.memfd_create("tls"), "wb") as file:  # noqa: PTH123 - a descriptor is no path
        file.write(pem)
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")


def _certificates(reason: str) -> ModuleType:
    try:
        from marserve.frontend.configuration import certificates
    except ImportError as error:
        raise ConfigError(
            f"{reason} needs the package cryptography: pip install cryptography"
        ) from error
    return certificates


def _read(path: Path) -> bytes:
    try:
        return read_file(path)
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {error.strerror}") from error
