"""A series of a metric: its labels are bound at its first update, then an update is one call.

Until then it is not shown: TorchServe's page has a metric's HELP and TYPE from the start, and its
samples only when there is something to tell. At that moment, too, the log is asked whether it wants
to know of the updates.
"""

import contextlib
from collections.abc import Callable

from prometheus_client.metrics import MetricWrapperBase

from marserve.frontend.telemetry.fast_counters import Update, counting, observing, setting

_UPDATE = {"counter": counting, "gauge": setting, "histogram": observing}


class Series:
    """One series.

    Args:
        kind: ``counter``, ``gauge`` or ``histogram``: whether an update adds, replaces or observes.
        metric: What it belongs to; None for a series nobody wants to see.
        values: Of its labels, in their order.
        find_note: Returns what is to be called with each update besides; None for nothing.

    Attributes:
        update: Takes the next value. Raises ValueError for a counter's negative increment.
    """

    __slots__ = ("_find_note", "_kind", "_metric", "_values", "update")

    def __init__(
        self,
        kind: str,
        metric: MetricWrapperBase | None,
        values: tuple[str, ...],
        find_note: Callable[[], Update | None] | None = None,
    ) -> None:
        self._find_note = find_note
        self._kind = kind
        self._metric = metric
        self._values = values
        self.update: Update = ignore if metric is None else self._begin

    def _begin(self, value: float) -> None:
        assert self._metric is not None
        update = _UPDATE[self._kind](self._metric.labels(*self._values))
        note = self._find_note() if self._find_note is not None else None
        if note is not None:
            update = _both(update, note)
        update(value)
        self.update = update

    def end(self) -> None:
        """Take it off the page; later updates are nobody's. Safe to call twice."""
        self.update = ignore
        if self._metric is not None:
            with contextlib.suppress(KeyError):  # it was never updated, or another took it away
                self._metric.remove(*self._values)

    def abandon(self) -> None:
        """Leave it on the page, where others go on with it, and never begin it again."""
        self.update = ignore


def _both(update: Update, note: Update) -> Update:
    def update_and_note(value: float) -> None:
        update(value)
        note(value)

    return update_and_note


def ignore(_value: float) -> None:
    """An update nobody wants."""
