"""Makes a worker that loads its model the kernel's first choice when memory runs out.

The kernel would end the largest process of the container, which mostly is another model's worker
that serves. Nobody needs a privilege to raise the score of a process, nor to lower it again to
where it was.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

_SCORE = Path("/proc/self/oom_score_adj")
# Thousandths of all memory that the kernel adds to what the process uses.
_MORE, _MOST = 500, 1000


@contextlib.contextmanager
def as_first_choice(score: Path = _SCORE) -> Iterator[None]:
    """Be ended before the others if memory runs out within the block."""
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
