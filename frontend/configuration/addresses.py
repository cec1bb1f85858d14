"""The addresses of listeners, and the files of those with TLS."""

import ipaddress
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

from marserve.frontend.configuration.setting_kinds import Kind, is_whole
from marserve.frontend.configuration.values import parsed

_LISTENERS = "http://host[:port], https://host[:port] or unix:/path"
_ON_THE_NETWORK = re.compile(
    r"(https?)://(?:([\w.-]+)|\[(.+)\])(?::(.*))?", re.ASCII | re.IGNORECASE
)
_HOST = re.compile(r"[\w.-]+", re.ASCII)
_MAX_SOCKET_PATH = 107  # bytes; the kernel has room for no more
# For listeners that are bound to all interfaces.
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - nothing is bound


@dataclass(frozen=True)
class Address:
    """A listener on the network."""

    host: str  # name or IP address
    port: int  # 0 lets the system choose one
    scheme: str = "http"  # or https, grpc, grpcs

    @property
    def is_private(self) -> bool:
        """Whether only this machine can connect; False for an unknown host name."""
        if self.host.lower() == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def client_url(self) -> str:
        """The URL for clients of this machine."""
        return replace(self, host=_LOOPBACK.get(self.host, self.host)).url

    @property
    def is_fixed(self) -> bool:
        """Whether an equal address is the same place."""
        return self.port != 0

    @property
    def url(self) -> str:
        """The address as in config.properties."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"


@dataclass(frozen=True)
class UnixAddress:
    """A listener in the file system, for programs of this machine."""

    path: Path

    is_private = True
    is_fixed = True

    @property
    def url(self) -> str:
        """The address as in config.properties."""
        return f"unix:{self.path}"

    client_url = url


@dataclass(frozen=True)
class TlsFiles:
    """The identity of listeners with TLS; without any file one is generated."""

    keystore: Path | None  # PKCS #12; goes before the other two
    keystore_pass: str  # opens it, and the key in it
    private_key_file: Path | None  # PEM
    certificate_file: Path | None  # PEM, followed by the certificates that lead to a root

    @property
    def are_configured(self) -> bool:
        """Whether no identity has to be generated."""
        return bool(self.keystore or (self.private_key_file and self.certificate_file))


def listener_address(http_port: int, https_port: int) -> Kind:
    """Return the kind of addresses, with the ports of addresses that name none."""
    implied = {"http": http_port, "https": https_port}

    def parse(text: str) -> Address | UnixAddress:
        if text[:5].lower() == "unix:":
            return _unix_address(text[5:])
        match = _ON_THE_NETWORK.fullmatch(text)
        if match is None:
            raise ValueError(_LISTENERS)
        scheme, name, ipv6, port = match.groups()
        scheme = scheme.lower()
        return Address(
            name.lower() if name else _ipv6(ipv6),
            implied[scheme] if port is None else PORT.from_text(port),
            scheme,
        )

    return parsed(_LISTENERS, parse)


def _host(text: str) -> str:
    """Return a name or an IP address; one of version 6 may be in brackets."""
    if text.startswith("[") and text.endswith("]"):
        return _ipv6(text[1:-1])
    if ":" in text:
        return _ipv6(text)
    if not _HOST.fullmatch(text):
        raise ValueError(HOST.rule)
    return text.lower()


def _unix_address(text: str) -> UnixAddress:
    path = text.removeprefix("//")
    if not path.startswith("/") or "\0" in path:
        raise ValueError(_LISTENERS)
    if len(os.fsencode(path)) > _MAX_SOCKET_PATH:
        raise ValueError(f"a path of at most {_MAX_SOCKET_PATH} bytes")
    return UnixAddress(Path(path))


def _ipv6(text: str) -> str:
    try:
        return str(ipaddress.IPv6Address(text))
    except ValueError as error:
        raise ValueError(f"an IPv6 address between the brackets ({error})") from error


#: The kind of a host name or an IP address; one of version 6 may be in brackets.
HOST = parsed("a host name or an IP address", _host)
#: The kind of port numbers; 0 lets the system choose one.
PORT = Kind(
    "a port from 0 to 65535",
    lambda port: is_whole(port, 0, 65535),
    parse=lambda text: int(text) if re.fullmatch(r"[0-9]{1,5}", text) else text,
)
#: The kind of types of key stores; JKS, too: keytool writes PKCS #12 under that name.
KEYSTORE_TYPE = Kind("PKCS12", lambda text: text in ("PKCS12", "JKS"), parse=str.upper)


def check_schemes(addresses: Sequence[Address | UnixAddress]) -> None:
    """Raise ValueError if a port has both http and https."""
    on_network = [each for each in addresses if isinstance(each, Address) and each.is_fixed]
    for left, right in combinations(on_network, 2):
        is_same_place = (left.host, left.port) == (right.host, right.port)
        if is_same_place and left.scheme != right.scheme:
            raise ValueError(f"{left.url} and {right.url} cannot both be served")
