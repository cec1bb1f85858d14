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
    gate.open()
    assert holding.result().status_code == 200
    assert server.ask("tickets").status_code == 200


def test_a_batch_has_a_ticket_for_each_of_its_seats(server, handlers, together):
    server.install(
        handlers / "lab.py", "seats", "useJobTicket: true\n", batch_size=3, max_batch_delay=60_000
    )
    answers = together([lambda i=i: server.ask("seats", id=i) for i in range(3)])
    assert [answer.json() for answer in answers] == [{"id": i, "batch": 3} for i in range(3)]
