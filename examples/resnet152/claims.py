"""What the demo says about the server's answers, and whether it is true."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from terminal import DemoFailed

Answer = Mapping[str, float]
"""Class name to probability, the most probable first."""

BATCH_METRICS = "name[]=marserve_batch_size_count&name[]=marserve_batch_size_sum"
"""Query that asks the metrics listener for the number of batches, and of requests in them."""

_ROUNDING = 0.01  # a batch of eight adds up in another order, on a GPU with few digits


def require(claim: bool, otherwise: str) -> None:
    """Raise `DemoFailed` with a sentence unless the claim is true."""
    if not claim:
        raise DemoFailed(otherwise)


def check_answer(answer: object, class_names: Sequence[str]) -> Answer:
    """An answer that is what image_classifier promises: five classes with their probabilities.

    Raises:
        DemoFailed: It is not; the text says how.
    """
    require(isinstance(answer, dict) and len(answer) == 5, f"These are not five classes: {answer}")
    assert isinstance(answer, dict)
    numbers = list(answer.values())
    require(set(answer) <= set(class_names), f"Not all of these are ImageNet classes: {answer}")
    require(
        all(isinstance(number, float) and 0 < number <= 1 for number in numbers)
        and sum(numbers) <= 1 + _ROUNDING,
        f"These are not probabilities: {answer}",
    )
    require(numbers == sorted(numbers, reverse=True), f"The best is not the first: {answer}")
    return answer


def is_same(one: Answer, other: Answer) -> bool:
    """Whether two answers name the same best class with the same probability, but for rounding."""
    (name, number), (other_name, other_number) = best(one), best(other)
    return name == other_name and abs(number - other_number) < _ROUNDING


def best(answer: Answer) -> tuple[str, float]:
    """The most probable class and its probability."""
    return next(iter(answer.items()))


def table(answer: Answer) -> str:
    """The classes of an answer, one per line, with their probabilities and a bar."""
    width = max(map(len, answer))
    return "\n".join(
        f"  {place}  {name:<{width}}  {number:7.2%}  {'█' * round(number * 40)}".rstrip()
        for place, (name, number) in enumerate(answer.items(), 1)
    )


@dataclass(frozen=True)
class Batches:
    """What the server has counted since its start.

    Attributes:
        batches: How many went to a worker.
        requests: How many requests travelled in them.
    """

    batches: int
    requests: int

    @classmethod
    def read(cls, metrics: str, model_name: str) -> "Batches":
        """Read the numbers of a model from the server's Prometheus text."""

        def number(name: str) -> int:
            label = f'model_name="{re.escape(model_name)}"'
            samples = re.findall(rf"^{name}{{.*{label}.*}} (\S+)$", metrics, re.MULTILINE)
            return int(sum(map(float, samples)))

        return cls(number("marserve_batch_size_count"), number("marserve_batch_size_sum"))

    def since(self, before: "Batches") -> "Batches":
        """What came on top of ``before``."""
        return Batches(self.batches - before.batches, self.requests - before.requests)
