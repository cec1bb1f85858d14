"""Shows the progress: a bar on a terminal, a line per run elsewhere."""

import importlib
import sys
import time
from typing import Any

from marserve.frontend.lifecycle.terminal import print_text
from marserve.tools.bench.generator.load import Load
from marserve.tools.bench.measurement import Measurement, Point
from marserve.tools.bench.reports.summary import format_point, number


class Progress:
    """Counts runs and tells nothing but notes; the others tell how far it is.

    Args:
        total: Runs that are planned; None where that is not known beforehand.
    """

    def __init__(self, total: int | None = None) -> None:
        self._total = total
        self._done = 0

    def begin(self, point: Point, load: Load) -> None:
        """A run begins."""
        self._done += 1
        of = f"/{self._total}" if self._total else ""
        self.draw(f"{self._done}{of}  {format_point(point)}", load)

    def draw(self, what: str, load: Load) -> None:
        """Show that this goes on."""

    def count(self, requests: int) -> None:
        """So many requests of it have come to an end."""

    def end(self, measurement: Measurement) -> None:
        """It is over."""

    def note(self, sentence: str) -> None:
        """Something that whoever reads the numbers should know."""
        self.close()
        print_text(sentence, sys.stderr)  # the report goes to standard output

    def close(self) -> None:
        """All is over."""


class Lines(Progress):
    """A line per run."""

    _what = ""

    def draw(self, what: str, _load: Load) -> None:
        """Keep it for the end."""
        self._what = what

    def end(self, measurement: Measurement) -> None:
        """Say what came of it."""
        failed = f", {measurement.failed} failed" if measurement.failed else ""
        what = f"{self._what}: {number(measurement.throughput)} answers/s{failed}"
        print_text(what, sys.stderr)


class Bar(Progress):
    """A bar per run, drawn by tqdm.

    Args:
        total: See `Progress`.
        tqdm: The class.
    """

    def __init__(self, total: int | None, tqdm: Any) -> None:
        super().__init__(total)
        self._tqdm = tqdm
        self._bar: Any = None

    def draw(self, what: str, load: Load) -> None:
        """Draw it."""
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
        """Move it, by the clock if that says when the run ends."""
        now = requests if self._began is None else time.monotonic() - self._began
        self._bar.set_postfix_str(f"{requests} requests", refresh=False)
        self._bar.update(min(now, self._bar.total) - self._bar.n)

    def end(self, _measurement: Measurement) -> None:
        """Wipe it away."""
        self.close()

    def close(self) -> None:
        """Wipe it away, if it is there."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def progress(total: int | None, *, is_wanted: bool) -> Progress:
    """What suits where standard error goes."""
    if not is_wanted:
        return Progress(total)
    try:
        tqdm = importlib.import_module("tqdm").tqdm
    except ImportError:
        return Lines(total)
    return Bar(total, tqdm) if sys.stderr.isatty() else Lines(total)
