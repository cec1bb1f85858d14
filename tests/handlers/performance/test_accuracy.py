import math

import pytest
import torch

from marserve.backend.errors import OptionRefused
from marserve.handlers.performance.accuracy import Accuracy
from marserve.handlers.performance.optimization import AccuracyGoal


def compared(expected: object, values: object) -> Accuracy:
    accuracy = Accuracy()
    accuracy.add(expected, values)
    return accuracy


def test_the_error_is_relative_to_the_largest_value():
    found = compared(torch.tensor([[4.0, -10.0, 0.0]]), torch.tensor([[4.0, -9.5, 0.1]]))
    assert found.relative_error == pytest.approx(0.05)
    assert found.agreement == 1.0


def test_the_worst_output_and_all_choices_count():
    item = torch.eye(4)
    accuracy = compared({"a": item, "b": item}, {"a": item, "b": item * 0.9})
    accuracy.add({"a": item}, {"a": item.flip(0)})
    assert accuracy.relative_error == 1.0
    assert (accuracy.agreeing, accuracy.choices) == (8, 12)
    assert accuracy.described() == {"relative_error": 1.0, "agreement": pytest.approx(8 / 12)}


@pytest.mark.parametrize(
    "values", [torch.tensor([[1.0, math.nan]]), torch.tensor([[1.0, math.inf]])]
)
def test_nan_and_infinity_are_infinite_errors(values):
    found = compared(torch.tensor([[1.0, 2.0]]), values)
    assert found.relative_error == math.inf
    assert found.described()["relative_error"] is None


def test_errors_relative_to_zero():
    assert compared(torch.zeros(2), torch.zeros(2)).relative_error == 0.0
    assert compared(torch.zeros(2), torch.ones(2)).relative_error == math.inf


def test_whole_numbers_are_choices():
    found = compared(torch.tensor([1, 2, 3]), torch.tensor([1, 2, 4]))
    assert (found.relative_error, found.agreeing, found.choices) == (0.0, 2, 3)


def test_each_pixel_is_a_choice():
    assert compared(torch.rand(2, 3, 4, 4), torch.rand(2, 3, 4, 4)).choices == 32


def test_a_single_output_has_no_choices():
    assert compared(torch.rand(2, 1), torch.rand(2, 1)).agreement is None


@pytest.mark.parametrize(
    ("goal", "sentence"),
    [
        (AccuracyGoal(max_relative_error=0.1), "relative error is 0.25 where 0.1 is allowed"),
        (AccuracyGoal(min_agreement=0.9), r"agreement is 50.00% where 90.00% is wanted"),
        (
            AccuracyGoal(max_relative_error=0.1, min_agreement=0.9),
            "error is 0.25 where 0.1 is allowed and the agreement is 50.00% where 90.00%",
        ),
    ],
)
def test_a_missed_goal_is_reported_with_both_figures(goal, sentence):
    found = compared(torch.tensor([[1.0, 4.0], [1.0, 2.0]]), torch.tensor([[1.0, 4.0], [2.0, 1.0]]))
    with pytest.raises(OptionRefused, match=sentence):
        found.check(goal)


def test_a_goal_that_is_reached():
    item = torch.rand(2, 2)
    compared(item, item).check(AccuracyGoal(max_relative_error=0.0, min_agreement=1.0))


@pytest.mark.parametrize(
    ("accuracy", "sentence"),
    [
        (Accuracy(), "the handler did not call the model"),
        (compared(torch.ones(2), torch.ones(3)), "its outputs have other shapes than in fp32"),
        (compared(torch.ones(2), (torch.ones(2),) * 2), "its outputs have other shapes"),
        (compared(torch.ones(2, 1), torch.ones(2, 1)), "this model's outputs choose nothing"),
    ],
)
def test_a_goal_that_cannot_be_measured_is_refused(accuracy, sentence):
    with pytest.raises(OptionRefused, match=sentence):
        accuracy.check(AccuracyGoal(min_agreement=0.5))


def test_both_models_get_the_unchanged_input():
    def in_place(x):
        return x.mul_(2)

    accuracy = Accuracy()
    result = accuracy.comparing(in_place, in_place)(torch.ones(2, 2))
    assert result.tolist() == [[2.0, 2.0], [2.0, 2.0]]
    assert accuracy.relative_error == 0.0
