"""Proves at load that batching changes no answer, as far as samples can (``validateBatching``).

Each sample is run alone, twice; then in batches of several sizes, at every place and beside
different others (`arrangements`); then alone once more. An answer that is not the one of the sample
alone tells of a handler that mixes its rows up, keeps something of one row for the next, or whose
results depend on the batch, as those of a BatchNorm that was left in training.

It runs through the same `Service.predict` as traffic, padding included.
"""

import itertools
import logging
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from marserve.backend.profiling.arrangements import arrangements
from marserve.backend.profiling.comparison import TOLERANCES, compare
from marserve.backend.profiling.warm_up import NoSample, find_samples
from marserve.backend.protocol import Input, Load, Prediction, Reply
from marserve.backend.service import Service, repeats

logger = logging.getLogger(__name__)

_MIN_SAMPLES = 2
_MAX_SAMPLES = 16
_MAX_PLACES = 8  # that are named

Clock = Callable[[], float]


@dataclass
class Validation:
    """What was found: as `Reply.validation` has it."""

    samples: int = 0
    sizes: list[int] = field(default_factory=list)  # those at which no answer was another
    largest: float = 0.0  # the largest difference between two numbers
    tolerance: float = 0.0
    failure: str = ""  # why batching is not known to change nothing; empty where it is

    def as_document(self) -> dict[str, Any]:
        """As JSON has it."""
        return vars(self)


class _Failed(Exception):
    pass


def validate(
    load: Load, service: Service, sizes: Sequence[int], clock: Clock = time.perf_counter
) -> Validation:
    """Compare the answers of batches of these sizes with those of single requests.

    The context of the service is afterwards as it was.
    """
    found = Validation(tolerance=load.tolerance or _usual_tolerance(service))
    began = clock()
    try:
        files = [load.sample_input, *load.more_samples] if load.sample_input else []
        samples = find_samples(load.model_dir, files, service.sample_input)[:_MAX_SAMPLES]
        with service.without_traces():
            _Validator(service, samples, load.compiled_sizes, found).run(
                sizes, lambda: clock() - began < load.validation_seconds
            )
    except (NoSample, _Failed) as error:
        found.failure = str(error)
    except (Exception, SystemExit) as error:  # foreign code
        logger.warning("Validating batches failed.", exc_info=True)
        found.failure = f"the handler failed: {error!r}"
    logger.info("Batching validated: %s", found)
    return found


def sizes_that_fit(sizes: Sequence[int], profiled: Reply) -> list[int]:
    """The sizes, less those beyond what profiling has found to fit or to pay."""
    largest = profiled.costs[-1][0] if profiled.costs else sizes[-1]
    return sorted({min(size, largest) for size in sizes} - {1})


def _usual_tolerance(service: Service) -> float:
    settings: Any = service.context.model_yaml_config
    section = settings.get("optimization") if isinstance(settings, dict) else None
    precision = section.get("precision") if isinstance(section, dict) else None
    return TOLERANCES.get(str(precision), TOLERANCES["fp32"])


class _Validator:
    def __init__(
        self,
        service: Service,
        samples: Sequence[Input],
        compiled_sizes: Sequence[int],
        found: Validation,
    ) -> None:
        self._service = service
        self._samples = samples
        self._compiled = compiled_sizes
        self._found = found
        self._alone: list[Prediction] = []
        self._wrong: dict[int, dict[int, str]] = defaultdict(dict)  # by size and place
        self._numbers = itertools.count()

    def run(self, sizes: Sequence[int], has_time: Callable[[], bool]) -> None:
        """Run all; what is wrong is in `_Failed`."""
        found, samples = self._found, self._samples
        found.samples = len({bytes(part.body) for each in samples for part in each.parts})
        if found.samples < _MIN_SAMPLES:
            raise _Failed(
                "it takes at least two different samples: name files of the archive, as "
                "sampleInput: [a, b], or have sample_input() return a tuple of them"
            )
        self._alone = [self._run([sample])[0] for sample in range(len(samples))]
        self._check_alone()
        pairs = itertools.combinations(self._alone, 2)
        if not any(self._difference(first, second) for first, second in pairs):
            raise _Failed(
                "the samples have the same answers, so that rows that are mixed up would not be "
                "seen: take others"
            )
        found.largest = 0.0  # so far it was that of different samples
        for size in sizes:
            if not self._has_run(size, has_time):
                late = f"batches of {size} did not fit the time that there is for it"
                raise _Failed(
                    "; ".join(filter(None, (self._sentence() if self._wrong else "", late)))
                )
            if size not in self._wrong:
                found.sizes.append(size)
        if self._wrong:
            raise _Failed(self._sentence())
        self._check_alone()

    def _has_run(self, size: int, has_time: Callable[[], bool]) -> bool:
        for arrangement in arrangements(size, len(self._samples)):
            if not has_time():
                return False
            answers = self._run(arrangement)
            for place, (sample, answer) in enumerate(zip(arrangement, answers, strict=True)):
                if what := self._difference(self._alone[sample], answer):
                    other = self._same_as(answer, sample)
                    self._wrong[size].setdefault(place, other or what)
        return True

    def _run(self, arrangement: Sequence[int]) -> list[Prediction]:
        batch = [
            repeats(self._samples[sample], [f"sample-{next(self._numbers)}"])[0]
            for sample in arrangement
        ]
        pieces: dict[int, bytes] = defaultdict(bytes)

        def keep(piece: Reply) -> None:
            for place, prediction in zip(piece.places, piece.predictions, strict=False):
                pieces[place] += bytes(prediction.body)

        size = len(batch)
        reply = self._service.predict(batch, keep, self._run_as(size))
        if reply.code != 200 or len(reply.predictions) != size:
            reason = f": {reply.message}" if reply.message else ""
            who = f"a batch of {size}" if size > 1 else f"sample {arrangement[0] + 1} alone"
            raise _Failed(f"{who} failed with status {reply.code}{reason}")
        for place, prediction in enumerate(reply.predictions):
            prediction.body = pieces[place] + bytes(prediction.body)
        return reply.predictions

    def _run_as(self, size: int) -> int:
        at = bisect_left(self._compiled, size)
        return self._compiled[at] if at < len(self._compiled) else 0

    def _check_alone(self) -> None:
        """Refuse answers to single requests that are errors, or that change."""
        for sample, before in enumerate(self._alone):
            if before.status >= 400:
                raise _Failed(f"sample {sample + 1} alone failed with status {before.status}")
            (now,) = self._run([sample])
            if what := self._difference(before, now):
                raise _Failed(
                    f"the answer to sample {sample + 1} alone is not always the same ({what}): "
                    "it is left to chance, or depends on requests that came before"
                )

    def _difference(self, first: Prediction, second: Prediction) -> str:
        """How two answers differ more than is tolerated; empty for not at all."""
        if first.status != second.status:
            return f"the status: {first.status} and {second.status}"
        difference = compare(first.body, second.body, self._found.tolerance)
        self._found.largest = max(self._found.largest, difference.largest)
        return difference.what

    def _same_as(self, answer: Prediction, sample: int) -> str:
        """The other sample whose answer it is; that is no difference to be counted."""
        largest = self._found.largest
        same = [
            number + 1
            for number, other in enumerate(self._alone)
            if number != sample and not self._difference(other, answer)
        ]
        self._found.largest = largest
        return f"the answer to sample {same[0]} instead of {sample + 1}" if same else ""

    def _sentence(self) -> str:
        sizes = [_at_size(size, wrong) for size, wrong in sorted(self._wrong.items())]
        return (
            f"batching changes answers: {'; '.join(sizes)}; the largest difference between two "
            f"numbers is {self._found.largest:.3g}, tolerated are {self._found.tolerance:g}"
        )


def _at_size(size: int, wrong: Mapping[int, str]) -> str:
    """The places of a size with other answers, and how the first one differs; from 0."""
    places = sorted(wrong)
    listed = ", ".join(map(str, places[:_MAX_PLACES])) + (", ..." if places[_MAX_PLACES:] else "")
    word = "place" if len(places) == 1 else "places"
    return f"in batches of {size} at {word} {listed} (at {places[0]}: {wrong[places[0]]})"
