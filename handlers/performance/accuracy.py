"""Compares an optimized model with the same model in fp32 on the same inputs.

* relative error   largest difference of two outputs, relative to the largest value in fp32. (By
                   element it would be meaningless: logits pass through zero.)
* agreement        share of rows with the same best class; the classes are in dimension 1, as for
                   torch's losses. For integers, the share of equal ones.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from marserve.backend.errors import OptionRefused
from marserve.handlers.performance.optimization import AccuracyGoal
from marserve.handlers.performance.precision import Forward
from marserve.handlers.performance.trees import map_tensors, tensors_of


@dataclass
class Accuracy:
    """The results of the comparisons so far."""

    relative_error: float = 0.0  # the largest; infinite for NaN and infinity
    agreeing: int = 0  # number of equal choices
    choices: int = 0
    batches: int = 0
    _fault: str = field(default="", repr=False)

    @property
    def agreement(self) -> float | None:
        """Share of equal choices; None without choices."""
        return self.agreeing / self.choices if self.choices else None

    def described(self) -> dict[str, float | None]:
        """Return the figures by name; an infinite error, which JSON lacks, is None."""
        error = self.relative_error if math.isfinite(self.relative_error) else None
        return {"relative_error": error, "agreement": self.agreement}

    def __str__(self) -> str:
        agreement = "none to measure" if self.agreement is None else f"{self.agreement:.2%}"
        return f"relative error {self.relative_error:.3g}, agreement {agreement}"

    def comparing(self, reference: Forward, forward: Forward) -> Forward:
        """Return a ``forward`` that also calls the reference and compares the results."""

        def run(*args: Any, **kwargs: Any) -> Any:
            # Copies, since a model may change its arguments.
            copied_args, copied_kwargs = map_tensors(torch.clone, (args, kwargs))
            expected = reference(*copied_args, **copied_kwargs)
            actual = forward(*args, **kwargs)
            self.add(expected, actual)
            return actual

        return run

    def add(self, expected: Any, actual: Any) -> None:
        """Compare an output in fp32 with one of the optimized model; both may be nested."""
        references, outputs = list(tensors_of(expected)), list(tensors_of(actual))
        if [each.shape for each in references] != [each.shape for each in outputs]:
            self._fault = "its outputs have other shapes than in fp32"
            return
        self.batches += 1
        for reference, output in zip(references, outputs, strict=True):
            self._add_tensor(reference.detach().cpu(), output.detach().cpu())

    def check(self, goal: AccuracyGoal) -> None:
        """Raise OptionRefused if a goal is missed or cannot be measured."""
        if self._fault or not self.batches:
            reason = self._fault or "the handler did not call the model"
            raise OptionRefused(f"optimization.check_accuracy has nothing to compare: {reason}.")
        if goal.min_agreement is not None and self.agreement is None:
            raise OptionRefused(
                "optimization.check_accuracy.min_agreement: this model's outputs choose nothing."
            )
        if misses := list(self._misses(goal)):
            raise OptionRefused(
                f"optimization.check_accuracy: against fp32, {' and '.join(misses)}."
            )

    def _misses(self, goal: AccuracyGoal) -> Iterable[str]:
        max_error, min_agreement = goal.max_relative_error, goal.min_agreement
        agreement = self.agreement
        if max_error is not None and not self.relative_error <= max_error:
            yield f"the relative error is {self.relative_error:.3g} where {max_error:g} is allowed"
        if min_agreement is not None and agreement is not None and agreement < min_agreement:
            yield f"the agreement is {agreement:.2%} where {min_agreement:.2%} is wanted"

    def _add_tensor(self, expected: torch.Tensor, actual: torch.Tensor) -> None:
        if not expected.numel():
            return
        if not expected.is_floating_point():
            self._add_choices(expected, actual)
            return
        self.relative_error = max(self.relative_error, _relative_error(expected, actual))
        if expected.dim() >= 2 and expected.shape[1] > 1:
            self._add_choices(expected.argmax(dim=1), actual.argmax(dim=1))

    def _add_choices(self, expected: torch.Tensor, actual: torch.Tensor) -> None:
        self.agreeing += int((expected == actual).sum())
        self.choices += expected.numel()


def _relative_error(expected: torch.Tensor, actual: torch.Tensor) -> float:
    scale = expected.abs().max().item()
    error = (expected - actual).abs().max().item()
    if error == 0:
        return 0.0
    return error / scale if scale and math.isfinite(error) else math.inf
