"""Keys that an operator gives: files of a directory, such as a Secret that Kubernetes mounts.

They are read again when they have changed. That is looked at when a key is asked for, at most every
few seconds, and not by a task: nobody waits for keys that nobody shows. A mounted Secret lies in
memory, so that reading it holds nothing up.
"""

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from marserve.frontend.errors import InvalidToken
from marserve.frontend.security.tokens import KINDS, REFUSED, Kind, holds

logger = logging.getLogger(__name__)

_SECONDS = 5.0
_LEAST = 8  # characters, as many as those have that the server makes up


class GivenTokens:
    """The keys in ``directory``: its files ``inference`` and ``management``, a key on each line.

    The first reading raises OSError or ValueError; where a later one fails, the old keys stay.
    """

    def __init__(self, directory: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory = directory
        self._clock = clock
        self._texts: dict[Kind, str] = {}
        self._keys: Mapping[Kind, tuple[str, ...]] = {}
        self._problem = ""
        self._read()
        self._next_look = clock() + _SECONDS

    def authorize(self, kind: Kind, authorization: str | None) -> None:
        """Raise InvalidToken unless an ``Authorization`` header has one of this kind's keys."""
        if self._clock() >= self._next_look:
            self._look_again()
        if not any(holds(authorization, key) for key in self._keys[kind]):
            raise InvalidToken(REFUSED)

    def renew(self, kind: str | None, authorization: str | None) -> None:  # noqa: ARG002 - nobody may
        """Raise InvalidToken: only the files change the keys."""
        raise InvalidToken("The keys are those of token_directory, which requests do not renew.")

    def _look_again(self) -> None:
        self._next_look = self._clock() + _SECONDS
        try:
            self._read()
        except (OSError, ValueError) as error:
            if str(error) != self._problem:
                self._problem = str(error)
                logger.error("token_directory: %s; the old keys stay.", error)  # noqa: TRY400 - all there is to say
            return
        self._problem = ""

    def _read(self) -> None:
        texts = {kind: (self._directory / kind).read_text(encoding="ascii") for kind in KINDS}
        if texts == self._texts:
            return
        keys = {kind: tuple(text.split()) for kind, text in texts.items()}
        for kind, found in keys.items():
            if not found or min(map(len, found)) < _LEAST:
                raise ValueError(
                    f"{self._directory / kind} needs keys of {_LEAST} characters or more"
                )
        if set(keys["inference"]) & set(keys["management"]):
            raise ValueError(f"a key of {self._directory} would be good for both kinds")
        if self._texts:
            logger.info("The keys in %s have changed.", self._directory)
        self._texts, self._keys = texts, keys
