"""Displays the progress: a bar on a terminal, a line per run elsewhere."""

import importlib
import sys
import time
from typing import Any

from marserve.frontend.lifecycle.terminal import print_text
from marserve.tools.bench.generator.load import Load
from marserve.tools.bench.measurement import Measurement, Point, format_kinds
from marserve.tools.bench.reports.summary import format_point, number


class Progress:
    """Displays nothing; subclasses display the progress.

    Args:
        total: Number of runs; None if it is not known beforehand.
    """

    def __init__(self, total: int | None = None) -> None:
        self._total = total
        self._done = 0

    def begin(self, point: Point, load: Load) -> None:
        """Start the display of a run."""
        self._done += 1
        of = f"/{self._total}" if self._total else ""
        self.draw(f"{self._done}{of}  {format_point(point)}", load)

    def draw(self, what: str, load: Load) -> None:
        """Display the name of the current run."""

    def count(self, requests: int) -> None:
        """Update the number of finished requests of the run."""

    def end(self, measurement: Measurement) -> None:
        """End the display of a run."""

    def close(self) -> None:
        """End the display."""


class Lines(Progress):
    """Prints a line per run."""

    _what = ""

    def draw(self, what: str, _load: Load) -> None:
        """Keep the name for the line at the end of the run."""
        self._what = what

    def end(self, measurement: Measurement) -> None:
        """Print the line of the run."""
        what = f"{self._what}: {number(measurement.throughput)} answers/s"
        if measurement.goal_ms is not None:
            in_time = measurement.within(measurement.goal_ms) / measurement.requests
            refused = f", {measurement.refused} refused" if measurement.refused else ""
            what += f", {in_time:.1%} in time{refused}"
        if measurement.failed:
            what += f", failed: {format_kinds(measurement.errors)}"
        print_text(what, sys.stderr)  # the report goes to standard output


class Bar(Progress):
    """Draws a bar per run with tqdm.

    Args:
        total: Number of runs; None if it is not known beforehand.
        tqdm: The class ``tqdm.tqdm``.
    """

    def __init__(self, total: int | None, tqdm: Any) -> None:
        super().__init__(total)
        self._tqdm = tqdm
        self._bar: Any = None

    def draw(self, what: str, load: Load) -> None:
        """Draw an empty bar."""
        self.close()
        self._began = time.monotonic() if load.seconds else None
        unit = "s" if load.seconds else "requests"
        self._bar = self._tqdm(
            desc=what,
            total=load.requests or load.warm_up + (load.seconds or 0.0),
            bar_format=f"{{desc}} |{{bar}}| {{n:.0f}}/{{total:.0f}} {unit}{{postfix}}",
            leave=False,
            file=sys.stderr,
        )

    def count(self, requests: int) -> None:
        """Advance the bar, by the clock if the run has a fixed length in seconds."""
        now = requests if self._began is None else time.monotonic() - self._began
        self._bar.set_postfix_str(f"{requests} requests", refresh=False)
        self._bar.update(min(now, self._bar.total) - self._bar.n)

    def end(self, _measurement: Measurement) -> None:
        """Remove the bar."""
        self.close()

    def close(self) -> None:
        """Remove the bar, if there is one."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def progress(total: int | None, *, is_wanted: bool) -> Progress:
    """Return a bar if standard error is a terminal and tqdm is installed, else lines."""
    if not is_wanted:
        return Progress(total)
    try:
        tqdm = importlib.import_module("tqdm").tqdm
    except ImportError:
        return Lines(total)
    return Bar(total, tqdm) if sys.stderr.isatty() else Lines(total)
