"""Keys and certificates that Python's ``ssl`` cannot read or make; needs ``cryptography``."""

import datetime as dt
import ipaddress
import socket
from collections.abc import Sequence

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    pkcs12,
)

_SELF_SIGNED_DAYS = 3650  # it never outlives the server


def keystore_pem(content: bytes, password: str) -> bytes:
    """Return the first private key of a PKCS #12 store and its certificates, as PEM.

    Raises:
        ValueError: The password is wrong, the store is damaged, or holds no key with a certificate.
    """
    key, certificate, chain = pkcs12.load_key_and_certificates(content, password.encode())
    if key is None or certificate is None:
        raise ValueError("it holds no private key with a certificate")
    return _pem(key, [certificate, *chain])


def self_signed_pem() -> bytes:
    """Return a new key and a self-signed certificate for this machine, as PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = dt.datetime.now(dt.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(hours=1))  # clocks differ
        .not_valid_after(now + dt.timedelta(days=_SELF_SIGNED_DAYS))
        .add_extension(x509.SubjectAlternativeName(_this_machine()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return _pem(key, [certificate])


def _this_machine() -> list[x509.GeneralName]:
    host = socket.gethostname()
    names = ["localhost"]
    if host.isascii() and host not in ("", "localhost"):
        names.append(host)
    return [
        *map(x509.DNSName, names),
        *(x509.IPAddress(ipaddress.ip_address(address)) for address in ("127.0.0.1", "::1")),
    ]


def _pem(key: PrivateKeyTypes, certificates: Sequence[x509.Certificate]) -> bytes:
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return b"".join([private, *(each.public_bytes(Encoding.PEM) for each in certificates)])
