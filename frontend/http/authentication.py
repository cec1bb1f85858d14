"""Authentication: tokens, and listeners that are for programs of this machine only.

Bound to loopback and with nothing configured, the server lets whoever can reach it register code.
A web page in the operator's own browser can: by a form that posts to 127.0.0.1, or by a host name
of its own that it points there (DNS rebinding). Browsers then send a foreign ``Origin`` or
``Host``, programs do not, so such requests are refused; but not where the operator has set
``disable_token_authorization``.
"""

import ipaddress
from collections.abc import Collection, Mapping
from urllib.parse import urlsplit

from marserve.frontend.errors import ForeignOrigin
from marserve.frontend.tokens import Kind, Tokens


class Guard:
    """Checks requests to guarded routes.

    Args:
        tokens: Checks tokens; None when authorization is off.
        local: Kinds of routes that are for programs of this machine only.
    """

    def __init__(self, tokens: Tokens | None, *, local: Collection[Kind] = ()) -> None:
        self._tokens = tokens
        self._local = local

    def admit(self, kind: Kind | None, headers: Mapping[str, str]) -> None:
        """Check a request by its headers, which are looked up in lower case.

        Args:
            kind: Of the route; None where it is not guarded.
            headers: Of the request.

        Raises:
            InvalidToken: It does not have the key of this kind.
            ForeignOrigin: It comes from a web page, to a route for programs of this machine.
        """
        if kind is None:
            return
        if self._tokens is not None:
            self._tokens.authorize(kind, headers.get("authorization"))
        if kind in self._local:
            _refuse_foreign_origin(headers)


def _refuse_foreign_origin(headers: Mapping[str, str]) -> None:
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
