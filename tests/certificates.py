"""A little certification authority, for the tests of https."""

import datetime as dt
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    KeySerializationEncryption,
    NoEncryption,
    PrivateFormat,
    pkcs12,
)

PASSWORD = "changeit"
KEY_USES = [
    "digital_signature",
    "content_commitment",
    "key_encipherment",
    "data_encipherment",
    "key_agreement",
    "key_cert_sign",
    "crl_sign",
    "encipher_only",
    "decipher_only",
]


@dataclass(frozen=True)
class Pair:
    """A key and the certificate that goes with it."""

    key: rsa.RSAPrivateKey
    certificate: x509.Certificate

    def key_pem(self, form: PrivateFormat = PrivateFormat.PKCS8, password: str = "") -> bytes:
        """The key: PKCS8 or PKCS1 (TraditionalOpenSSL)."""
        encryption: KeySerializationEncryption = NoEncryption()
        if password:
            encryption = BestAvailableEncryption(password.encode())
        return self.key.private_bytes(Encoding.PEM, form, encryption)

    def certificate_pem(self) -> bytes:
        """The certificate."""
        return self.certificate.public_bytes(Encoding.PEM)


def make_pair(
    name: str, issuer: Pair | None = None, *, is_authority: bool = False, bits: int = 2048
) -> Pair:
    """A new pair, signed by an issuer or by itself; good for localhost and 127.0.0.1."""
    key = rsa.generate_private_key(65537, bits)
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = dt.datetime.now(dt.UTC)
    hosts = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer.certificate.subject if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
    )
    if issuer:  # Python verifies strictly since 3.13: a certificate names the key that signed it
        signed_by = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer.key.public_key())
        builder = builder.add_extension(signed_by, critical=False)
    if is_authority:
        identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        builder = builder.add_extension(identifier, critical=False)
        uses = dict.fromkeys(KEY_USES, False) | {"key_cert_sign": True, "crl_sign": True}
        builder = builder.add_extension(x509.KeyUsage(**uses), critical=True)
    else:
        builder = builder.add_extension(x509.SubjectAlternativeName(hosts), critical=False)
    return Pair(key, builder.sign(issuer.key if issuer else key, hashes.SHA256()))


@dataclass(frozen=True)
class Authority:
    """A root, an authority below it, and what that made for a server, in a folder.

    Attributes:
        folder: Holds root.pem, key.pem (PKCS8), key1.pem (PKCS1), locked.pem (encrypted),
            chain.pem, other.pem (somebody else's certificate) and store.p12.
    """

    folder: Path

    @property
    def root(self) -> str:
        """The certificate that clients trust."""
        return str(self.folder / "root.pem")

    def file(self, name: str) -> str:
        """A file's path."""
        return str(self.folder / name)


def make_authority(folder: Path) -> Authority:
    """Make all of it."""
    root = make_pair("root", is_authority=True)
    middle = make_pair("middle", root, is_authority=True)
    server = make_pair("server", middle)
    chain = server.certificate_pem() + middle.certificate_pem()
    store = pkcs12.serialize_key_and_certificates(
        b"server",
        server.key,
        server.certificate,
        [middle.certificate],
        BestAvailableEncryption(PASSWORD.encode()),
    )
    contents = {
        "root.pem": root.certificate_pem(),
        "key.pem": server.key_pem(),
        "key1.pem": server.key_pem(PrivateFormat.TraditionalOpenSSL),
        "locked.pem": server.key_pem(password="secret"),
        "chain.pem": chain,
        "other.pem": root.certificate_pem(),
        "store.p12": store,
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return Authority(folder)
