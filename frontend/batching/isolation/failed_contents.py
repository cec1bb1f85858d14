"""Remembers the contents of requests that failed alone, so that repetitions run alone.

Clients repeat what failed, and a repetition in a batch would have to be isolated again. A content
is forgotten when it succeeds. Clients are not remembered: behind a proxy all have one address.
"""

import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b

from marserve.backend.protocol import Buffer
from marserve.frontend.batching.jobs import Job

_CAPACITY = 1024
_SECONDS = 600.0
# Of a larger body only slices are hashed: 6 MB would take the event loop 6 ms. Contents that differ
# only between the slices count as equal, so that one of them runs alone unnecessarily.
_HASHED_WHOLE = 64 * 1024
_SLICES = 16
_SLICE = _HASHED_WHOLE // _SLICES
# The number of bytes from the middle by which contents of one length mostly differ.
_MIDDLE = 32

_Outline = tuple[int, bytes]


@dataclass(slots=True)
class _Entry:
    outline: _Outline
    expires: float
    crashes: bool


class FailedContents:
    """A bounded memory of contents; the least recently failed one is forgotten first.

    A content is hashed only if one of the same length and with the same middle is remembered.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self._outlines: Counter[_Outline] = Counter()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, job: Job) -> bool:
        return self._find(job) is not None

    def has_crashed(self, job: Job) -> bool:
        """Return whether this content has ended a worker when it ran alone."""
        entry = self._find(job)
        return entry is not None and entry.crashes

    def add(self, job: Job, *, crashes: bool = False) -> None:
        """Remember that a job failed alone, or ended its worker."""
        key, outline = _key_of(job), _outline_of(job)
        known = self._pop(key)
        crashes = crashes or (known is not None and known.crashes)
        self._entries[key] = _Entry(outline, self._clock() + _SECONDS, crashes)
        self._outlines[outline] += 1
        self.forget_expired()
        while len(self._entries) > _CAPACITY:
            self._pop(next(iter(self._entries)))

    def discard(self, job: Job) -> None:
        """Forget the content of a job that succeeded."""
        if _outline_of(job) in self._outlines:
            self._pop(_key_of(job))

    def forget_expired(self) -> None:
        """Forget contents that have not failed lately."""
        now = self._clock()
        while self._entries:
            key, entry = next(iter(self._entries.items()))
            if entry.expires > now:
                return
            self._pop(key)

    def _find(self, job: Job) -> _Entry | None:
        if _outline_of(job) not in self._outlines:
            return None
        self.forget_expired()
        return self._entries.get(_key_of(job))

    def _pop(self, key: bytes) -> _Entry | None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._outlines[entry.outline] -= 1
            if not self._outlines[entry.outline]:
                del self._outlines[entry.outline]
        return entry


def _outline_of(job: Job) -> _Outline:
    """Return the length of all parts, and bytes from the middle of the longest."""
    bodies = [part.body for part in job.input.parts]
    longest = max(bodies, key=len, default=b"")
    start = max(0, (len(longest) - _MIDDLE) // 2)
    return sum(map(len, bodies)), bytes(memoryview(longest)[start : start + _MIDDLE])


def _key_of(job: Job) -> bytes:
    """Return a hash of the group and the parts; headers differ between equal requests."""
    found = blake2b(job.group.value.encode(), digest_size=16)
    for part in job.input.parts:
        # Names are text with surrogates where clients send other bytes.
        head = f"\n{part.name}\n{part.content_type}\n{len(part.body)}\n"
        found.update(head.encode("utf-8", "surrogatepass"))
        _hash_into(found.update, memoryview(part.body))
    return found.digest()


def _hash_into(update: Callable[[Buffer], None], body: memoryview) -> None:
    if len(body) <= _HASHED_WHOLE:
        update(body)
        return
    for number in range(_SLICES):
        start = (len(body) - _SLICE) * number // (_SLICES - 1)
        update(body[start : start + _SLICE])
