from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch

from marserve.handlers.performance.trees import map_tensors, tensors_of


class Point(NamedTuple):
    x: Any
    y: Any


FIRST, SECOND = torch.tensor([1.0]), torch.tensor([2.0])


@pytest.mark.parametrize(
    "tree",
    [
        FIRST,
        [FIRST, "text", SECOND],
        (FIRST, None),
        Point(FIRST, 3),
        OrderedDict(b=SECOND, a=[FIRST]),
        torch.tensor([[3.0, 4.0]]).max(dim=1),
        {"deep": [(FIRST, {"er": SECOND})], "empty": []},
    ],
)
def test_tensors_are_replaced_in_the_same_structure(tree):
    doubled = map_tensors(lambda tensor: tensor * 2, tree)
    assert type(doubled) is type(tree)
    pairs = zip(tensors_of(tree), tensors_of(doubled), strict=True)
    assert all(torch.equal(after, before * 2) for before, after in pairs)
    assert repr(map_tensors(str, doubled)) == repr(
        map_tensors(lambda tensor: str(tensor * 2), tree)
    )


def test_a_mapping_that_a_model_returns_is_not_changed():
    tree = {"logits": FIRST}
    map_tensors(torch.neg, tree)["more"] = SECOND
    assert tree == {"logits": FIRST}


def test_tensors_come_in_order():
    assert list(tensors_of({"b": [SECOND, 1], "a": (FIRST,)})) == [SECOND, FIRST]
