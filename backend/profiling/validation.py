"""Checks with samples that batching changes no answer (``validateBatching``).

Each sample is run alone, twice; then in batches of several sizes, at every place and beside
different others; then alone again. An answer that differs from the one to the sample alone
shows a handler that mixes up rows, keeps state of one row for the next, or whose results depend on
the batch (a BatchNorm left in training mode).

With `Trials.only_differences` the comparison is the default, and only a clear difference counts.
"""

import itertools
import logging
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from marserve.backend.batch_run import repeats
from marserve.backend.profiling.comparison import TOLERANCES, compare
from marserve.backend.profiling.samples import NoSample, find_samples
from marserve.backend.protocol import BatchCost, Input, Load, Piece, Predict, Prediction
from marserve.backend.service import Service

logger = logging.getLogger(__name__)

_MIN_SAMPLES = 2
_MAX_SAMPLES = 16
_MAX_PLACES = 8  # in the message
_SMALL = 3
_MIN_ROW_SECONDS = 1e-9
# The least tolerance if only differences count: of a GPU's TF32, whose rounding depends on the size
# of the batch. Rows that are mixed up differ more.
_CERTAIN_DIFFERENCE = 0.01


@dataclass
class Validation:
    """The sizes without a difference, and why batching may change answers, if it may."""

    samples: int = 0
    sizes: list[int] = field(default_factory=list)
    largest: float = 0.0
    tolerance: float = 0.0
    failure: str = ""


class _Failed(Exception):
    """Batching may change answers; the message is the reason."""


class _Differs(_Failed):
    """Batching changes answers."""


def comparison(
    load: Load,
    service: Service,
    costs: Sequence[BatchCost],
    clock: Callable[[], float],
    found: Validation,
    longest: float = math.inf,
) -> Iterator[None]:
    """Compare the answers to batches with those to single requests, as `Load.trials` say.

    Yields after each run. The result is in ``found`` at the end. Sizes beyond the largest of the
    ``costs``, if there are any, are replaced by it: they do not fit into memory, or gain nothing.
    Above 3, those whose run is expected to take ``longest`` are replaced by smaller ones.
    """
    trials = load.trials
    tolerance = _default_tolerance(service)
    if trials.only_differences:
        tolerance = max(tolerance, _CERTAIN_DIFFERENCE)
    found.tolerance = trials.tolerance or tolerance
    deadline = clock() + trials.validation_seconds

    def has_time(size: int, reserve: float) -> bool:
        seconds = next((cost.seconds for cost in costs if cost.size >= size), 0.0)
        if not costs and trials.only_differences:
            seconds = size * validator.row_seconds
        return clock() + seconds + reserve < deadline

    largest = costs[-1].size if costs else trials.validated_sizes[-1]
    sizes = sorted({min(size, largest) for size in trials.validated_sizes} - {1})
    is_difference = False
    try:
        samples = find_samples(load.model_dir, load.samples, service.sample_input)[:_MAX_SAMPLES]
        validator = _Validator(service, samples, load.compiled_sizes, found, clock)
        yield from validator.runs(sizes, has_time, longest)
    except (NoSample, _Failed) as error:
        found.failure, is_difference = str(error), isinstance(error, _Differs)
    except (Exception, SystemExit) as error:  # foreign code
        logger.warning("Validating batches failed.", exc_info=True)
        found.failure = f"the handler failed: {error!r}"
    logger.info("Batching validated: %s", found)
    if trials.only_differences and not is_difference:
        found.failure = ""


def _default_tolerance(service: Service) -> float:
    settings: Any = service.context.model_yaml_config
    section = settings.get("optimization") if isinstance(settings, dict) else None
    precision = section.get("precision") if isinstance(section, dict) else None
    return TOLERANCES.get(str(precision), TOLERANCES["fp32"])


def arrangements(size: int, samples: int) -> Iterator[Sequence[int]]:
    """Yield the numbers of the samples at the places of a batch, for several batches.

    Each sample comes to each place, and any two places have different samples in at least one
    batch: the number of a place, written in base ``samples``, has a digit for each batch.
    """
    digit = 1
    while True:
        for shift in range(samples):
            yield [(place // digit + shift) % samples for place in range(size)]
        digit *= samples
        if digit >= size:
            return


class _Validator:
    def __init__(
        self,
        service: Service,
        samples: Sequence[Input],
        compiled_sizes: Sequence[int],
        found: Validation,
        clock: Callable[[], float],
    ) -> None:
        self._service = service
        self._samples = samples
        self._compiled = compiled_sizes
        self._found = found
        self._clock = clock
        self.row_seconds = 0.0  # of the latest run
        self._alone: list[Prediction] = []
        self._wrong: dict[int, dict[int, str]] = defaultdict(dict)  # by size and place
        self._numbers = itertools.count()

    def runs(
        self, sizes: Sequence[int], has_time: Callable[[int, float], bool], longest: float
    ) -> Iterator[None]:
        """Run all batches for which there is time: by their size, and the seconds to reserve.

        Yields after each run.
        """
        found, began = self._found, self._clock()
        yield from self._run_alone(has_time)
        reserve = (self._clock() - began) / 2  # to check them again
        found.largest, end = 0.0, ""  # that of different samples until now
        for wanted in sizes:
            size = min(wanted, max(_SMALL, self._rows_in(longest)))
            if size < wanted and size in sizes:
                continue
            try:
                yield from self._run_size(size, partial(has_time, size, reserve))
            except _Failed as error:
                end = str(error)
                break
            if size not in self._wrong:
                found.sizes.append(size)
        yield from self._check_alone()
        if self._wrong:
            raise _Differs("; ".join(filter(None, [self._sentence(), end])))
        if end:
            raise _Failed(end)

    def _run_alone(self, has_time: Callable[[int, float], bool]) -> Iterator[None]:
        """Run each sample alone, twice, and check that their answers can be compared."""
        samples = self._samples
        self._found.samples = len({bytes(part.body) for each in samples for part in each.parts})
        if self._found.samples < _MIN_SAMPLES:
            raise _Failed(
                "it takes at least two different samples: name files of the archive, as "
                "sampleInput: [a, b], or have sample_input() return a tuple of them"
            )
        began = self._clock()
        for sample in range(len(samples)):
            if not has_time(1, 2 * (self._clock() - began)):
                raise _Failed("single requests did not fit into the time for it")
            self._alone += self._run([sample])
            yield
        yield from self._check_alone()
        pairs = itertools.combinations(self._alone, 2)
        if not any(self._difference(first, second) for first, second in pairs):
            raise _Failed(
                "the samples have the same answers, which would not show that rows are mixed up: "
                "take other samples"
            )

    def _rows_in(self, seconds: float) -> int:
        return int(min(seconds / max(self.row_seconds, _MIN_ROW_SECONDS), sys.maxsize))

    def _run_size(self, size: int, has_time: Callable[[], bool]) -> Iterator[None]:
        for arrangement in arrangements(size, len(self._samples)):
            if not has_time():
                raise _Failed(f"batches of {size} did not fit into the time for it")
            answers = self._run(arrangement)
            for place, (sample, answer) in enumerate(zip(arrangement, answers, strict=True)):
                if what := self._difference(self._alone[sample], answer):
                    self._wrong[size].setdefault(place, self._mix_up(answer, sample) or what)
            yield

    def _run(self, arrangement: Sequence[int]) -> list[Prediction]:
        batch = [
            repeats(self._samples[sample], [f"sample-{next(self._numbers)}"])[0]
            for sample in arrangement
        ]
        pieces: dict[int, bytes] = defaultdict(bytes)

        def keep(piece: Piece) -> None:
            for place, prediction in zip(piece.places, piece.predictions, strict=False):
                pieces[place] += bytes(prediction.body)

        size, began = len(batch), self._clock()
        run_as = next((compiled for compiled in self._compiled if compiled >= size), 0)
        reply = self._service.predict(Predict(batch, run_as=run_as), keep)
        self.row_seconds = (self._clock() - began) / size
        if reply.code != 200 or len(reply.predictions) != size:
            reason = f": {reply.message}" if reply.message else ""
            what = f"a batch of {size}" if size > 1 else f"sample {arrangement[0] + 1} alone"
            raise _Failed(f"{what} failed with status {reply.code}{reason}")
        for place, prediction in enumerate(reply.predictions):
            prediction.body = pieces[place] + bytes(prediction.body)
        return reply.predictions

    def _check_alone(self) -> Iterator[None]:
        """Check that the answers to single requests are the same as before."""
        for sample, before in enumerate(self._alone):
            if before.status >= 400:
                raise _Failed(f"sample {sample + 1} alone failed with status {before.status}")
            (now,) = self._run([sample])
            yield
            if what := self._difference(before, now):
                raise _Failed(
                    f"the answer to sample {sample + 1} alone is not always the same ({what}): "
                    "it is random, or depends on earlier requests"
                )

    def _difference(self, first: Prediction, second: Prediction) -> str:
        if first.status != second.status:
            return f"the status: {first.status} and {second.status}"
        difference = compare(first.body, second.body, self._found.tolerance)
        self._found.largest = max(self._found.largest, difference.largest)
        return difference.what

    def _mix_up(self, answer: Prediction, sample: int) -> str:
        """Describe the sample to which it is the answer, if it is another; empty if not."""
        largest = self._found.largest  # that to another sample does not count
        same = [
            number + 1
            for number, other in enumerate(self._alone)
            if number != sample and not self._difference(other, answer)
        ]
        self._found.largest = largest
        return f"the answer to sample {same[0]} instead of {sample + 1}" if same else ""

    def _sentence(self) -> str:
        sizes = [_describe(size, wrong) for size, wrong in sorted(self._wrong.items())]
        return (
            f"batching changes answers: {'; '.join(sizes)}; the largest difference between two "
            f"numbers is {self._found.largest:.3g}, tolerated are {self._found.tolerance:g}"
        )


def _describe(size: int, wrong: Mapping[int, str]) -> str:
    places = sorted(wrong)
    listed = ", ".join(map(str, places[:_MAX_PLACES])) + (", ..." if places[_MAX_PLACES:] else "")
    word = "place" if len(places) == 1 else "places"
    return f"in batches of {size} at {word} {listed} (at {places[0]}: {wrong[places[0]]})"
