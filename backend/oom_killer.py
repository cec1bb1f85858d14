"""Makes a worker that loads its model the kernel's first choice when memory runs out.

Otherwise the kernel would kill the largest process of the container, mostly a worker of another
model that serves. A process needs no privilege to raise its score and to restore it.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

_SCORE = Path("/proc/self/oom_score_adj")
# Thousandths of all memory that the kernel adds to what the process uses.
_MORE, _MOST = 500, 1000


@contextlib.contextmanager
def as_first_choice(score: Path = _SCORE) -> Iterator[None]:
    """Raise the score of this process during the block, so that it is killed first."""
    try:
        before = score.read_text()
        score.write_text(str(min(int(before) + _MORE, _MOST)))
    except OSError:  # there is no /proc, or it is read-only
        yield
        return
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            score.write_text(before)
