"""The check of requests to guarded routes; docs/security.md has its rules as a table.

A web page in a browser can post a form to 127.0.0.1, or resolve its host name to it (DNS
rebinding): browsers then send a foreign ``Origin`` or ``Host``. A proxy on this machine forwards
requests of other machines: most proxies can add headers that show it.
"""

import ipaddress
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from urllib.parse import urlsplit

from marserve.frontend.configuration.config import Config
from marserve.frontend.errors import ForeignOrigin
from marserve.frontend.security.given_tokens import Tokens
from marserve.frontend.security.tokens import KINDS, Kind

_FORWARDED = re.compile(r"forwarded|x-forwarded-.*|x-real-ip|via", re.IGNORECASE)


@dataclass(frozen=True)
class Guard:
    """Checks requests to guarded routes."""

    tokens: Tokens | None  # None: no keys
    _: KW_ONLY
    #: Whether requests need no key. A ``Bearer`` key of a management request must be correct all
    #: the same, and then nothing else is checked.
    keyless: bool = False
    local: Collection[Kind] = ()  # routes that without a key are for programs on this machine only
    browsers: bool = True  # whether web pages can send requests to the listener

    @classmethod
    def of(cls, config: Config, tokens: Tokens | None, *, browsers: bool) -> "Guard":
        """Return the guard of a listener."""
        local: Sequence[Kind] = ("management",) if config.local_management else ()
        local, keyless = KINDS if config.debugged else local, not config.token_authorization
        return cls(tokens, keyless=keyless, local=local, browsers=browsers)

    def checks(self, kind: Kind | None) -> bool:
        """Return whether `admit` checks anything for a route of this kind."""
        return kind is not None and (
            kind in self.local
            or (self.tokens is not None and (not self.keyless or kind == "management"))
        )

    def admit(self, kind: Kind | None, headers: Mapping[str, str]) -> None:
        """Check a request to a route by its headers, whose names are in lower case.

        Raises:
            InvalidToken: It does not have the key of this kind.
            ForeignOrigin: It has no key, and is not from a program on this machine.
        """
        if kind is None:
            return
        if self.tokens is not None and (
            # On other routes without keys the header may be for the handler.
            not self.keyless or (kind == "management" and _has_bearer(headers))
        ):
            self.tokens.authorize(kind, headers.get("authorization"))
        elif kind in self.local:
            for name in filter(_FORWARDED.fullmatch, headers):
                raise ForeignOrigin(f"the header {name}")
            if self.browsers:
                _refuse_pages(headers)


def _has_bearer(headers: Mapping[str, str]) -> bool:
    return headers.get("authorization", "").lower().startswith("bearer")


def _refuse_pages(headers: Mapping[str, str]) -> None:
    host = headers.get("host", "localhost")
    if not _is_loopback(host):
        raise ForeignOrigin(f"Host {host}")
    origin = headers.get("origin")
    if origin is not None and origin.partition("://")[2] != host:
        raise ForeignOrigin(f"Origin {origin}")
    if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        raise ForeignOrigin(f"Sec-Fetch-Site {headers['sec-fetch-site']}")


def _is_loopback(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
        is_local = name == "localhost" or name.endswith(".localhost")
        return is_local or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
