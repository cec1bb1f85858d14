"""Requests of asynchronous handlers whose clients leave, and the handler's task for them."""

import json

import pytest

pytestmark = pytest.mark.integration

SOURCE = """
import asyncio


class Handler:
    is_cancellable = {is_cancellable}

    def initialize(self, context):
        self.states = {{}}

    async def handle(self, data, context):
        order = data[0]["body"]
        if order.get("read"):
            return [self.states]
        name = order["name"]
        self.states[name] = "running"
        try:
            if order.get("pieces"):
                context.send_intermediate(["piece"], context.request_ids, "Result", 200)
            await asyncio.sleep(order["seconds"])
            self.states[name] = "finished"
            return ["end"]
        except asyncio.CancelledError:
            self.states[name] = "cancelled"
            raise
"""


@pytest.fixture(params=[True, False], ids=["cancellable", "not cancellable"])
def model(server, request):
    name = f"sleeper-{request.param}"
    if not server.is_known(name):
        source = SOURCE.format(is_cancellable=request.param)
        server.install(source, name, "asyncCommunication: true\n")
    return name


def states(server, model):
    return server.predict(model, json={"read": True}).json()


def leave(server, wait_for, model, **order):
    body = json.dumps(order).encode()
    head = f"POST /predictions/{model} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    with server.connect("inference") as connection:
        connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        wait_for(lambda: states(server, model).get(order["name"]) == "running")


@pytest.mark.parametrize("pieces", [False, True], ids=["whole answer", "stream"])
def test_a_client_that_leaves(server, wait_for, model, pieces):
    name = f"left-{pieces}"
    leave(server, wait_for, model, name=name, seconds=2, pieces=pieces)
    end = "cancelled" if model.endswith("True") else "finished"
    wait_for(lambda: states(server, model)[name] != "running")
    assert states(server, model)[name] == end
    server.wait_taken(model, 0)


def test_a_deadline(server, wait_for, model):
    order = {"name": "late", "seconds": 2}
    answer = server.predict(model, json=order, headers={"x-timeout-ms": "200"})
    assert answer.status_code == 504
    wait_for(lambda: states(server, model)["late"] != "running")
    assert states(server, model)["late"] == ("cancelled" if model.endswith("True") else "finished")


def test_answered_requests_are_not_cancelled(server, model):
    answer = server.predict(model, json={"name": "quick", "seconds": 0, "pieces": True})
    assert answer.text == "pieceend"
    assert states(server, model)["quick"] == "finished"
    assert server.worker(model)["status"] == "READY"
