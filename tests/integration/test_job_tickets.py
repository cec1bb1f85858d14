"""``useJobTicket``: a request is taken only when a worker waits for one."""

import pytest

pytestmark = pytest.mark.integration


def test_a_request_is_refused_while_every_worker_is_busy(server, handlers, gate, background):
    server.install(handlers / "lab.py", "tickets", "useJobTicket: true\n")
    assert server.describe("tickets")["useJobTicket"] is True
    holding = background(server.ask, "tickets", gate=gate.path)
    gate.wait_entered()
    refused = server.ask("tickets")
    assert refused.status_code == 503
    assert refused.json()["type"] == "ServiceUnavailableException"
    assert refused.json()["message"].endswith(
        ". useJobTicket is set, and the model has 1 busy worker and no idle one."
    )
    gate.open()
    assert holding.result().status_code == 200
    assert server.ask("tickets").status_code == 200


def test_a_batch_has_a_ticket_for_each_of_its_seats(server, handlers, together):
    server.install(
        handlers / "lab.py", "seats", "useJobTicket: true\n", batch_size=3, max_batch_delay=60_000
    )
    answers = together([lambda i=i: server.ask("seats", id=i) for i in range(3)])
    assert [answer.json() for answer in answers] == [{"id": i, "batch": 3} for i in range(3)]


def test_a_seat_in_a_batch_on_its_way_has_a_ticket_too(
    server, handlers, gate, background, tmp_path
):
    config = "useJobTicket: true\ncontinuousBatching: true\nbatchSize: 2\nmaxBatchDelay: 1\n"
    server.install(handlers / "stepper.py", "joining", config)

    def count(name, until, **orders):
        order = {"name": name, "until": until, "record": str(tmp_path / "record"), **orders}
        return server.predict("joining", json=order)

    first = background(count, "a", 3, gate=gate.path)
    gate.wait_entered()
    second = background(count, "b", 1)
    server.wait_queued("joining", 1)
    assert count("c", 1).status_code == 503
    gate.open()
    assert [item.result().status_code for item in (first, second)] == [200, 200]
