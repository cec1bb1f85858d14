"""A model whose batches take a known time and no processor: 4 ms, and 0.35 ms for each request.

The figures of a small GPU. It sleeps, so that on a small machine the server and its clients do not
slow it down.
"""

import time
from typing import Any

PER_BATCH = 0.004
PER_REQUEST = 0.00035


def handle(data: Any, _context: Any) -> Any:
    """Initialise (``data`` is None), or answer a batch."""
    if data is None:
        return None
    until = time.perf_counter() + PER_BATCH + PER_REQUEST * len(data)
    while (left := until - time.perf_counter()) > 0:
        time.sleep(left)
    return [b"done"] * len(data)
