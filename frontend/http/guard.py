"""Who may come in: the check that stands before a guarded route."""

from collections.abc import Collection, Mapping

from marserve.frontend.http.authentication import Kind, TokenStore
from marserve.frontend.http.origin import refuse_foreign_origin


class Guard:
    """Checks requests to guarded routes.

    Args:
        tokens: Checks tokens; None when authorization is off.
        local: What is for programs of this machine only.
    """

    def __init__(self, tokens: TokenStore | None, *, local: Collection[Kind] = ()) -> None:
        self._tokens = tokens
        self._local = local

    def has_rules_for(self, kind: Kind | None) -> bool:
        """Whether there is anybody it would not admit to routes that this key opens."""
        if kind is None:
            return False
        return self._tokens is not None or kind in self._local

    def admit(self, kind: Kind | None, headers: Mapping[str, str]) -> None:
        """Let a request pass, or not.

        Args:
            kind: Whose key opens the route; None for everybody.
            headers: Of the request; names are looked up in any case.

        Raises:
            InvalidToken: It does not hold that key.
            ForeignOrigin: It comes from a web page and asks for what is local.
        """
        if self._tokens is not None and kind is not None:
            self._tokens.authorize(kind, headers.get("Authorization"))
        if kind in self._local:
            refuse_foreign_origin(headers)
