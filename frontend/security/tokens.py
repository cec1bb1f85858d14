"""The keys of clients, for inference and for management.

By default the rules are TorchServe's: three keys, new at every start, in ``key_file.json``. The
inference and the management key expire; the API key, which renews them, does not. Unlike
TorchServe, the server removes the key file when it stops.
"""

import hmac
import json
import re
import secrets
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Literal, NamedTuple

from marserve.frontend.atomic_file import replace_file
from marserve.frontend.errors import InvalidToken
from marserve.frontend.regular_files import read_file

Kind = Literal["inference", "management"]
KINDS: Final[tuple[Kind, ...]] = ("management", "inference")

_LAST_DATE = 253402300799.0  # the end of the year 9999, the last of datetime

_BEARER = re.compile(r"Bearer\s+(\S+)", re.ASCII)
# Clients search for TorchServe's text.
_FAILED = "Token {} failed. Token either incorrect, expired, or not provided correctly"
REFUSED = (
    f"{_FAILED.format('Authorization')}. The flag --disable-token-auth serves without tokens; "
    "--enable-model-api permits registration over HTTP."
)
_NOT_RENEWED = _FAILED.format("Authentication")


class _Token(NamedTuple):
    key: str
    expires: float  # seconds since the epoch


class TokenStore:
    """New keys of a running server, in memory and in the key file ``path``.

    `write` creates the file and `close` removes it. ``lifetime`` is in seconds of the wall clock,
    whose time the file contains.
    """

    def __init__(self, path: Path, lifetime: float, clock: Callable[[], float] = time.time) -> None:
        self.path = path
        self._lifetime = lifetime
        self._clock = clock
        self._api_key = _new_key()
        self._written = ""
        self._tokens = self._new_tokens(*KINDS)

    def write(self) -> None:
        """Write the key file, or raise OSError."""
        self._replace(self._tokens)

    def authorize(self, kind: Kind, authorization: str | None) -> None:
        """Raise InvalidToken unless an ``Authorization`` header has the valid key of this kind."""
        token = self._tokens[kind]
        if not holds(authorization, token.key) or self._clock() >= token.expires:
            raise InvalidToken(REFUSED)

    def renew(self, kind: str | None, authorization: str | None) -> None:
        """Replace the key of a kind, and its expiry.

        Raises InvalidToken without the API key, or OSError; then the old key stays valid.
        """
        for known in KINDS:
            if kind == known and holds(authorization, self._api_key):
                return self._replace(self._tokens | self._new_tokens(known))
        raise InvalidToken(_NOT_RENEWED)

    def close(self) -> None:
        """Remove the key file, unless another server has replaced it."""
        try:
            is_ours = read_file(self.path) == self._written.encode()
        except OSError:
            return
        if is_ours:
            self.path.unlink(missing_ok=True)

    def _new_tokens(self, *kinds: Kind) -> dict[Kind, _Token]:
        expires = self._clock() + self._lifetime
        return {kind: _Token(_new_key(), expires) for kind in kinds}

    def _replace(self, tokens: dict[Kind, _Token]) -> None:
        text = _key_file(tokens, self._api_key)
        replace_file(self.path, text.encode(), durable=False)  # it is removed at the end
        self._tokens, self._written = tokens, text


def _new_key() -> str:
    key = secrets.token_urlsafe(6)  # eight characters, as TorchServe's
    # On a command line a key that begins with a dash would be an option.
    return _new_key() if key.startswith("-") else key


def holds(authorization: str | None, key: str) -> bool:
    """Return whether an ``Authorization`` header has a key, in constant time."""
    match = _BEARER.fullmatch(authorization or "")
    # Bytes: compare_digest refuses text beyond ASCII.
    return match is not None and hmac.compare_digest(
        match[1].encode("utf-8", "replace"), key.encode()
    )


def _key_file(tokens: dict[Kind, _Token], api_key: str) -> str:
    keys = {
        kind: {"key": token.key, "expiration time": _utc(token.expires)}
        for kind, token in tokens.items()
    }
    return json.dumps({**keys, "API": {"key": api_key}}, indent=2) + "\n"


def _utc(epoch: float) -> str:
    moment = datetime.fromtimestamp(min(epoch, _LAST_DATE), UTC)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")
