"""``--validate``: checks that requests have the same answers in batches as alone.

Each payload is sent alone, twice; then all of them in a changing order by enough concurrent clients
to fill two batches, until the server reports a batch of the full size (`_ROUNDS` at most). Every
answer must equal the one to the payload alone. TorchServe does not report the sizes of batches;
there a single round is compared.
"""

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from marserve.backend.profiling.comparison import TOLERANCES, compare
from marserve.tools.bench.client import Answer, Client
from marserve.tools.bench.errors import BenchError
from marserve.tools.bench.model_server import ModelServer, explained
from marserve.tools.bench.payloads import Payload
from marserve.tools.bench.requests import with_content_type

_ROUNDS = 20
_MIN_PAYLOADS = 2
_MAX_PAYLOADS = 64
_MAX_CLIENTS = 256
_MAX_LISTED = 5  # differences


@dataclass
class Validated:
    """The result of the comparison with the settings of a point.

    Attributes:
        batch_size: The model's maximum batch size.
        sizes: Sizes of the batches in the comparison; None if the server does not report them.
        answers: Number of compared answers.
        largest: Largest difference between two numbers.
        tolerance: Accepted difference between two numbers.
        differences: A clause for each answer that differs from the one to the request alone.
    """

    batch_size: int
    tolerance: float
    sizes: set[int] | None = field(default_factory=set)
    answers: int = 0
    largest: float = 0.0
    differences: list[str] = field(default_factory=list)

    @property
    def failure(self) -> str:
        """Return why the validation failed, in a sentence; empty if it did not."""
        if self.differences:
            more = len(self.differences) - _MAX_LISTED
            listed = "; ".join(self.differences[:_MAX_LISTED])
            return f"Batching changes answers: {listed}{f'; {more} more' if more > 0 else ''}."
        if self.sizes is not None and max(self.sizes, default=0) < _MIN_PAYLOADS:
            return (
                "No batches were formed, so batching was not tested: use a larger --batch-size or "
                "--max-batch-delay."
            )
        return ""

    @property
    def text(self) -> str:
        """Return the line of the report."""
        sizes = "sizes not reported by the server" if self.sizes is None else _listed(self.sizes)
        return (
            f"batch size {self.batch_size}: {self.answers} answers, in batches of: {sizes}; "
            f"largest difference {self.largest:.3g}, tolerated {self.tolerance:g}"
        )


class Validation:
    """Compares the answers to batched requests with those to the same requests alone."""

    def __init__(
        self,
        server: ModelServer,
        client: Client,
        target: str,
        payloads: Sequence[Payload],
        tolerance: float | None,
    ) -> None:
        self._server = server
        self._client = client
        self._target = target
        self._payloads = list({each.body: each for each in payloads}.values())[:_MAX_PAYLOADS]
        self._given_tolerance = tolerance
        self._order = random.Random(0)  # noqa: S311 - no secret
        if len(self._payloads) < _MIN_PAYLOADS:
            raise BenchError("--validate needs at least two different inputs: several --input.")

    def run(self, clients: int | None) -> Validated:
        """Compare with the present settings, by default with clients for two full batches.

        Raises:
            BenchError: A request alone fails, or its answers do not allow a comparison.
        """
        model = self._server.describe()
        size = model.largest_batch
        found = Validated(size, self._tolerance())
        alone = self._answers_alone(found)
        count = clients or min(_MAX_CLIENTS, 2 * size)
        with ThreadPoolExecutor(count) as threads:
            for _ in range(_ROUNDS):
                self._round(threads, count, alone, found)
                if found.differences or found.sizes is None or size in found.sizes:
                    break
        return found

    def _tolerance(self) -> float:
        if self._given_tolerance is not None:
            return self._given_tolerance
        section = self._server.handler_metadata().get("optimization")
        precision = section.get("precision") if isinstance(section, dict) else None
        return TOLERANCES.get(str(precision), TOLERANCES["fp32"])

    def _answers_alone(self, found: Validated) -> Sequence[Answer]:
        alone = [self._ask(payload) for payload in self._payloads]
        for number, (payload, answer) in enumerate(zip(self._payloads, alone, strict=True), 1):
            if not answer.is_success:
                raise BenchError(f"Input {number} alone failed: {explained(answer, '--token')}")
            again = self._ask(payload)
            if what := compare(answer.body, again.body, found.tolerance).what:
                raise BenchError(
                    f"The answer to input {number} alone is not always the same ({what}): there "
                    "is nothing to compare with."
                )
        if not any(compare(alone[0].body, other.body, found.tolerance).what for other in alone[1:]):
            raise BenchError("All inputs have the same answer, so exchanged answers are not found.")
        return alone

    def _round(
        self, threads: ThreadPoolExecutor, count: int, alone: Sequence[Answer], found: Validated
    ) -> None:
        before = self._server.past_batches()
        order = [index % len(self._payloads) for index in range(count)]
        self._order.shuffle(order)
        answers = list(threads.map(lambda number: self._ask(self._payloads[number]), order))
        after = self._server.past_batches()
        if before is None or after is None or found.sizes is None:
            found.sizes = None
        else:
            found.sizes |= _sizes_since(before, after)
        for number, answer in zip(order, answers, strict=True):
            found.answers += 1
            if what := _difference(alone, number, answer, found):
                found.differences.append(f"input {number + 1}: {what}")

    def _ask(self, payload: Payload) -> Answer:
        headers = with_content_type(self._client.headers, payload)
        client = Client(self._client.destination, headers, self._client.timeout)
        return client.ask("POST", self._target, payload.body)


def _difference(alone: Sequence[Answer], number: int, answer: Answer, found: Validated) -> str:
    """Return how an answer differs from the one to the request alone; empty if it does not."""
    expected = alone[number]
    if answer.status != expected.status:
        return f"status {answer.status} instead of {expected.status} ({answer.sentence})"
    difference = compare(expected.body, answer.body, found.tolerance)
    found.largest = max(found.largest, difference.largest)
    if not difference.what:
        return ""
    same = [
        other + 1
        for other, each in enumerate(alone)
        if other != number and not compare(each.body, answer.body, found.tolerance).what
    ]
    return f"the answer to input {same[0]}" if same else difference.what


def _sizes_since(before: Sequence[dict[str, int]], after: Sequence[dict[str, int]]) -> set[int]:
    """Return the sizes of the batches after the last one of ``before``."""
    new = after
    if before and before[-1] in after:
        last = len(after) - 1 - list(reversed(after)).index(before[-1])
        new = after[last + 1 :]
    return {int(batch["size"]) for batch in new}


def _listed(sizes: set[int]) -> str:
    return ", ".join(map(str, sorted(sizes))) or "none"
