"""The destination of requests: an address, and how its certificate is checked."""

import ssl
from dataclasses import dataclass
from pathlib import Path

from marserve.frontend.configuration.addresses import Address, UnixAddress, listener_address
from marserve.tools.bench.errors import BenchError

_ADDRESS = listener_address(80, 443)


@dataclass(frozen=True)
class Destination:
    """The address of a listener.

    Attributes:
        url: ``http://host:port``, ``https://host:port`` or ``unix:/path``.
        verify: Whether the certificate of an https listener must be trusted.
        ca_file: PEM file with the trusted certificates; empty for the system's.
    """

    url: str
    verify: bool = True
    ca_file: str = ""

    @property
    def address(self) -> Address | UnixAddress:
        """Return host and port, or the path of a socket.

        Raises:
            BenchError: The URL is malformed, or has no port.
        """
        try:
            address: Address | UnixAddress = _ADDRESS.from_text(self.url.rstrip("/"))
        except ValueError as error:
            raise BenchError(f"{self.url!r} is not the address of a server: {error}.") from None
        if not address.is_fixed:
            raise BenchError(f"{self.url!r} does not contain a port.")
        return address

    @property
    def host(self) -> str:
        """Return the value of the ``Host`` header."""
        address = self.address
        if isinstance(address, UnixAddress):
            return "localhost"
        return address.url.partition("://")[2]

    def tls(self) -> ssl.SSLContext | None:
        """Return the TLS context; None for a listener without TLS.

        Raises:
            BenchError: The file with certificates is missing or malformed.
        """
        address = self.address
        if isinstance(address, UnixAddress) or address.scheme != "https":
            return None
        context = _context(self.ca_file)
        if not self.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context


def _context(ca_file: str) -> ssl.SSLContext:
    if ca_file and not Path(ca_file).is_file():
        raise BenchError(f"The file {ca_file} with certificates does not exist.")
    try:
        return ssl.create_default_context(cafile=ca_file or None)
    except ssl.SSLError:
        raise BenchError(f"{ca_file} contains no certificates in PEM format.") from None
