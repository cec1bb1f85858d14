"""A series of a metric: its labels are bound at its first update, then an update is one call.

Until then it is not shown: TorchServe's page has a metric's HELP and TYPE from the start, and its
samples only when there is something to tell.
"""

import contextlib
from collections.abc import Callable
from typing import Any

from prometheus_client.metrics import MetricWrapperBase

from marserve.frontend.telemetry.quick import counting, observing, setting

_UPDATE = {"counter": counting, "gauge": setting, "histogram": observing}


class Series:
    """One series.

    Args:
        kind: ``counter``, ``gauge`` or ``histogram``: whether an update adds, replaces or observes.
        metric: What it belongs to; None for a series nobody wants to see.
        values: Of its labels, in their order.

    Attributes:
        update: Takes the next value. Raises ValueError for a counter's negative increment.
    """

    __slots__ = ("_kind", "_metric", "_values", "update")

    def __init__(
        self, kind: str, metric: MetricWrapperBase | None, values: tuple[str, ...]
    ) -> None:
        self._kind = kind
        self._metric = metric
        self._values = values
        self.update: Callable[[float], Any] = ignore if metric is None else self._begin

    def _begin(self, value: float) -> None:
        assert self._metric is not None
        update = _UPDATE[self._kind](self._metric.labels(*self._values))
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


def ignore(_value: float) -> None:
    """An update nobody wants."""
