import math
from collections.abc import Callable

import pytest

from marserve.frontend.batching.expected_goodput import Outlook
from marserve.frontend.batching.job_queue import JobQueue

MakeQueue = Callable[..., JobQueue]


class Costs:
    """A batch takes from 0.5 to 1.5 s, each as likely; counts how often it is asked."""

    is_known = True

    def __init__(self) -> None:
        self.asked = 0

    def mean(self, _size: float) -> float:
        return 1.0

    def bound(self, _size: float) -> float:
        return 1.5

    def chance(self, _size: float, seconds: float) -> float:
        self.asked += 1
        return min(1.0, max(0.0, seconds - 0.5))


def outlook(queue: JobQueue, costs: Costs, rate: float = 0.0) -> Outlook:
    return Outlook(costs, queue, 0.0, 1, 1, rate, math.inf)


def test_one_of_whom_another_would_have_more_is_refused(make_queue: MakeQueue) -> None:
    assert outlook(make_queue([1.2]), Costs()).should_run(0)
    assert outlook(make_queue([1.2, 60.0]), Costs()).should_run(0)
    assert not outlook(make_queue([1.2, 1.3]), Costs()).should_run(0)


def test_the_longer_the_queue_will_last_the_more_would_gain(make_queue: MakeQueue) -> None:
    few = make_queue([1.4, 0.9])  # the other gains 0.4 at once
    assert outlook(few, Costs()).should_run(0)
    assert not outlook(few, Costs(), rate=0.9).should_run(0)


@pytest.mark.parametrize("spread", [0.0, 1e-5, 0.01, 0.5])
def test_thousands_that_wait_are_decided_on_at_once(make_queue: MakeQueue, spread: float) -> None:
    costs = Costs()
    queue = make_queue([1.2 + spread * place for place in range(3000)])
    looked = outlook(queue, costs)
    for place in range(3000):
        looked.should_run(place)
    assert costs.asked <= 250 * 3000
