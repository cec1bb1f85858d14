"""Checks of the server's answers against what the demo states about them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from terminal import DemoFailed

Answer = Mapping[str, float]
"""Probability by class name, the highest first."""

BATCH_METRICS = "name[]=marserve_batch_size_count&name[]=marserve_batch_size_sum"
"""Query for the metrics listener: the numbers of batches and of requests in them."""

_ROUNDING = 0.01  # sums depend on the batch size, on a GPU with few digits


def require(claim: bool, otherwise: str) -> None:
    """Raise `DemoFailed` with a message unless the claim is true."""
    if not claim:
        raise DemoFailed(otherwise)


def check_answer(answer: object, class_names: Sequence[str]) -> Answer:
    """Return the answer if it has five classes and valid probabilities, else raise DemoFailed."""
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
    """Return whether two answers have the same best class with the same rounded probability."""
    (name, number), (other_name, other_number) = best(one), best(other)
    return name == other_name and abs(number - other_number) < _ROUNDING


def best(answer: Answer) -> tuple[str, float]:
    """Return the most probable class and its probability."""
    return next(iter(answer.items()))


def table(answer: Answer) -> str:
    """Return the classes of an answer, one per line, with probability and bar."""
    width = max(map(len, answer))
    return "\n".join(
        f"  {place}  {name:<{width}}  {number:7.2%}  {'█' * round(number * 40)}".rstrip()
        for place, (name, number) in enumerate(answer.items(), 1)
    )


@dataclass(frozen=True)
class Batches:
    """The numbers of batches and of requests in them since the server's start."""

    batches: int
    requests: int

    @classmethod
    def read(cls, metrics: str, model_name: str) -> "Batches":
        """Read the numbers of a model from the Prometheus text."""

        def number(name: str) -> int:
            label = f'model_name="{re.escape(model_name)}"'
            samples = re.findall(rf"^{name}{{.*{label}.*}} (\S+)$", metrics, re.MULTILINE)
            return int(sum(map(float, samples)))

        return cls(number("marserve_batch_size_count"), number("marserve_batch_size_sum"))

    def since(self, before: "Batches") -> "Batches":
        """Return the difference to earlier numbers."""
        return Batches(self.batches - before.batches, self.requests - before.requests)
