"""Who goes first, and whose seats are whose."""

import pytest

pytestmark = pytest.mark.integration


@pytest.fixture
def queue_up(server, background, gate, record):
    """Have a worker held, send requests one after the other, let it go on; who was served when."""

    def queue(name, *sent):
        answers = [background(server.ask, name, id="held", gate=gate.path)]
        gate.wait_entered()
        for number, (id_, priority) in enumerate(sent, 1):
            headers = {"X-Priority": priority} if priority else {}
            order = {"id": id_, "record": str(record)}
            answers.append(background(server.predict, name, json=order, headers=headers))
            server.wait_queued(name, number)
        gate.open()
        assert [answer.result().status_code for answer in answers] == [200] * len(answers)
        return record.read_text().split()

    return queue


def test_a_higher_one_that_comes_later_goes_first(server, handlers, queue_up):
    server.install(handlers / "lab.py", "fixed", batch_size=1)
    sent = [("1", None), ("2", "normal"), ("3", "HIGH")]
    assert queue_up("fixed", *sent) == ["3", "1", "2"]


def test_each_class_is_served_in_the_order_of_arrival(server, handlers, queue_up):
    # A goal far away: nobody has waited so long that a class makes no difference any more.
    server.install(handlers / "lab.py", "goal", batch_size=1, max_latency_ms=60_000)
    sent = [("l1", "low"), ("n1", "normal"), ("h1", "high"), ("n2", None), ("l2", "Low")]
    assert queue_up("goal", *sent, ("h2", "high")) == ["h1", "h2", "n1", "n2", "l1", "l2"]


def test_a_flood_of_one_class_leaves_the_seats_of_the_others(
    server, handlers, background, make_gate
):
    config = "jobQueueSize: 2\npriorityQueueSizes: {high: 1, low: 3}\n"
    server.install(handlers / "lab.py", "seats", config)
    gate = make_gate()
    accepted = [background(server.ask, "seats", gate=gate.path)]
    gate.wait_entered()

    def ask(priority):
        return server.predict("seats", json={}, headers={"X-Priority": priority})

    queued, free = 0, []
    for priority, seats in (("low", 3), ("normal", 2), ("high", 1)):
        for _ in range(seats):
            accepted.append(background(ask, priority))
            queued += 1
            server.wait_queued("seats", queued)
        refused = ask(priority)
        assert (refused.status_code, refused.json()["type"]) == (503, "ServiceUnavailableException")
        free.append(server.describe("seats")["jobQueueStatus"]["remainingCapacity"])
    gate.open()
    assert free == [2, 0, 0]  # for requests that say nothing of their class
    assert [answer.result().status_code for answer in accepted] == [200] * 7
