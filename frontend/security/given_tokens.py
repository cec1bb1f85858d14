"""Keys in files of a directory, such as a mounted Secret of Kubernetes.

A request that needs a key reads changed files again, at most every few seconds. A mounted Secret is
in memory, so that reading it does not block.
"""

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from marserve.frontend.errors import InvalidToken
from marserve.frontend.regular_files import NoFile, read_file
from marserve.frontend.security.tokens import KINDS, REFUSED, Kind, TokenStore, holds

logger = logging.getLogger(__name__)

_SECONDS = 5.0
_MIN_LENGTH = 8  # characters, the length of the keys that the server makes


class GivenTokens:
    """The keys in the files ``inference`` and ``management`` of a directory, one a line.

    The constructor raises OSError or ValueError. If a later read fails, the old keys stay valid.
    """

    def __init__(self, directory: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory = directory
        self._clock = clock
        self._texts: dict[Kind, str] = {}
        self._keys: Mapping[Kind, tuple[str, ...]] = {}
        self._problem = ""
        self._read()
        self._next_read = clock() + _SECONDS

    def authorize(self, kind: Kind, authorization: str | None) -> None:
        """Raise InvalidToken unless an ``Authorization`` header has one of this kind's keys."""
        if self._clock() >= self._next_read:
            self._refresh()
        if not any(holds(authorization, key) for key in self._keys[kind]):
            raise InvalidToken(REFUSED)

    def renew(self, kind: str | None, authorization: str | None) -> None:  # noqa: ARG002 - it always raises
        """Raise InvalidToken: only the files change the keys."""
        raise InvalidToken("The keys are those of token_directory, which requests do not renew.")

    def _refresh(self) -> None:
        self._next_read = self._clock() + _SECONDS
        try:
            self._read()
        except (OSError, ValueError) as error:
            if str(error) != self._problem:
                self._problem = str(error)
                logger.error("token_directory: %s; the old keys stay.", error)  # noqa: TRY400 - no traceback
            return
        self._problem = ""

    def _read(self) -> None:
        texts = {kind: self._text_of(kind) for kind in KINDS}
        if texts == self._texts:
            return
        keys = {kind: tuple(text.split()) for kind, text in texts.items()}
        for kind, found in keys.items():
            if not found or min(map(len, found)) < _MIN_LENGTH:
                raise ValueError(
                    f"{self._directory / kind} needs keys of {_MIN_LENGTH} characters or more"
                )
        if set(keys["inference"]) & set(keys["management"]):
            raise ValueError(f"a key of {self._directory} is in both files")
        if self._texts:
            logger.info("The keys in %s have changed.", self._directory)
        self._texts, self._keys = texts, keys

    def _text_of(self, kind: Kind) -> str:
        path = self._directory / kind
        try:
            return read_file(path).decode("ascii")
        except NoFile as error:
            raise ValueError(f"{path} {error}") from error


#: The keys of a server.
Tokens = TokenStore | GivenTokens
