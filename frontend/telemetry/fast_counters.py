"""Updates of bound metrics without what the library does at each of them.

prometheus_client checks at every update whether the metric has all its labels, and takes a lock,
for several threads may count. Here one thread counts, the event loop's, and labels are bound once;
nine updates in the life of a request were an eighth of what the frontend did for it (402 to 352
thousand instructions). So the number itself is changed, where the library keeps it as we know it;
where it does not (another release, or its mode for several processes), the library does it.
"""

from bisect import bisect_left
from collections.abc import Callable
from typing import Any

from prometheus_client.values import MutexValue

Update = Callable[[float], Any]


def counting(counter: Any) -> Update:
    """What adds to a counter whose labels are bound; raises ValueError for less than nothing."""
    cell = _cell(counter, "_value")
    if cell is None:
        return counter.inc  # type: ignore[no-any-return]  # the library's gap

    def count(amount: float) -> None:
        if amount < 0:
            raise ValueError("Counters can only be incremented by non-negative amounts.")
        cell._value += amount  # noqa: SLF001 - see above

    return count


def setting(gauge: Any) -> Update:
    """What sets a gauge whose labels are bound."""
    cell = _cell(gauge, "_value")
    if cell is None:
        return gauge.set  # type: ignore[no-any-return]  # the library's gap

    def set_to(value: float) -> None:
        cell._value = value  # noqa: SLF001 - see above

    return set_to


def observing(histogram: Any) -> Update:
    """What takes a number into a histogram whose labels are bound."""
    total = _cell(histogram, "_sum")
    buckets = getattr(histogram, "_buckets", ())
    bounds = getattr(histogram, "_upper_bounds", ())
    is_known = buckets and len(buckets) == len(bounds)
    if total is None or not is_known or not all(type(one) is MutexValue for one in buckets):
        return histogram.observe  # type: ignore[no-any-return]  # the library's gap

    def observe(value: float) -> None:
        total._value += value  # noqa: SLF001 - see above
        if value == value:  # what is not a number is in no bucket
            buckets[bisect_left(bounds, value)]._value += 1  # noqa: SLF001 - see above

    return observe


def _cell(metric: Any, name: str) -> Any:
    """Where a metric keeps a number, if that is the plain way."""
    cell = getattr(metric, name, None)
    return cell if type(cell) is MutexValue and hasattr(cell, "_value") else None
