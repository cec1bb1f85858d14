"""Keeps web pages away from a management listener that asks for no token.

Bound to loopback and with nothing configured, the server lets whoever can reach it register code.
A web page in the operator's own browser can: by a form that posts to 127.0.0.1, or by a host name
of its own that it points there (DNS rebinding). Programs send neither a foreign ``Origin`` nor a
foreign ``Host``; browsers cannot help it. Only in force while the default is: whoever sets
``disable_token_authorization`` has decided.
"""

import ipaddress
from collections.abc import Mapping
from urllib.parse import urlsplit

from marserve.frontend.errors import ForeignOrigin


def refuse_foreign_origin(headers: Mapping[str, str]) -> None:
    """Check that a request comes from a program of this machine, as far as headers can tell.

    Raises:
        ForeignOrigin: It comes from a web page, or under a name that is not this machine's.
    """
    host = headers.get("Host", "localhost")
    if not _is_loopback(_hostname(host)):
        raise ForeignOrigin(f"Host {host}")
    origin = headers.get("Origin")
    if origin is not None and origin.partition("://")[2] != host:
        raise ForeignOrigin(f"Origin {origin}")
    if headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
        raise ForeignOrigin(f"Sec-Fetch-Site {headers['Sec-Fetch-Site']}")


def _hostname(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _is_loopback(hostname: str) -> bool:
    if hostname == "localhost" or hostname.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(hostname).is_loopback
    except ValueError:
        return False
