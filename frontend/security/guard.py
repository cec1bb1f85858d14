"""Which requests may use a guarded route.

docs/security.md has the rule as a table, by setting and address ("which requests need a key"):

* ``key``: a request needs the key of its kind.
* ``local``: a request needs no key if it comes from a program on this machine. A ``Bearer`` key
  that a management request contains must be right, and then nothing else is checked.
* ``open``: nothing is checked.

Requests from this machine are not always made by its user. A web page in a browser can post a form
to 127.0.0.1, or resolve a host name of its own to it (DNS rebinding): browsers then send a foreign
``Origin`` or ``Host``. A proxy on this machine passes on requests of other machines: most can add
headers that say so.
"""

import ipaddress
import re
from collections.abc import Collection, Mapping, Sequence
from urllib.parse import urlsplit

from marserve.frontend.configuration.config import Config
from marserve.frontend.errors import ForeignOrigin
from marserve.frontend.security.tokens import KINDS, Kind, Tokens

_FORWARDED = re.compile(r"forwarded|x-forwarded-.*|x-real-ip|via", re.IGNORECASE)


class Guard:
    """Checks requests to guarded routes.

    Args:
        tokens: Checks keys; None where there are none.
        keyless: Whether requests need no key although there are keys.
        local: Kinds of routes that without a key are for programs on this machine only.
        browsers: Whether web pages can send requests to the listener.
    """

    def __init__(
        self,
        tokens: Tokens | None,
        *,
        keyless: bool = False,
        local: Collection[Kind] = (),
        browsers: bool = True,
    ) -> None:
        self._tokens = tokens
        self._keyless = keyless
        self._local = local
        self._browsers = browsers

    @classmethod
    def of(cls, config: Config, tokens: Tokens | None, *, browsers: bool) -> "Guard":
        """Return the guard of a listener."""
        local: Sequence[Kind] = ("management",) if config.local_management else ()
        local, keyless = KINDS if config.debugged else local, not config.token_authorization
        return cls(tokens, keyless=keyless, local=local, browsers=browsers)

    def checks(self, kind: Kind | None) -> bool:
        """Whether `admit` checks anything of a request to a route of this kind."""
        return kind is not None and (
            kind in self._local
            or (self._tokens is not None and (not self._keyless or kind == "management"))
        )

    def admit(self, kind: Kind | None, headers: Mapping[str, str]) -> None:
        """Check a request to a route by its headers, which are looked up in lower case.

        Raises:
            InvalidToken: It does not have the key of this kind.
            ForeignOrigin: It has no key, and is not from a program on this machine.
        """
        if kind is None:
            return
        if self._tokens is not None and (
            # On other routes the header may be for the handler.
            not self._keyless or (kind == "management" and _has_bearer(headers))
        ):
            self._tokens.authorize(kind, headers.get("authorization"))
        elif kind in self._local:
            for name in filter(_FORWARDED.fullmatch, headers):
                raise ForeignOrigin(f"the header {name}")
            if self._browsers:
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
