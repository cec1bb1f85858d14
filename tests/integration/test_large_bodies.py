"""Bodies of all sizes come through unchanged, by every way, also while workers are killed."""

import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from grpc_client import connected

pytestmark = pytest.mark.integration

# Around what is sent apart from the rest of a message, and what is received in place.
SIZES = (16_384, 16_385, 65_536, 65_537, 300_000, 1_000_000, 6_500_000)
ECHO = "def handle(data, context):\n    return data and [row.get('body') for row in data]\n"
CHANGES = """
def handle(data, context):
    for row in data or ():
        assert type(row["body"]) is bytearray
        row["body"] += b"more"
        row["body"][0:1] = b"!"
    return data and [row["body"] for row in data]
"""
COROUTINE = "async def handle(data, context):\n    return data and [row['body'] for row in data]\n"
ASYNCHRONOUS = "asyncCommunication: true\n"
SLOW = "import time\n" + ECHO.replace("    return", "    time.sleep(0.05)\n    return")
OCTETS = {"content-type": "application/octet-stream"}


@pytest.fixture(scope="module", autouse=True)
def models(server):
    server.install(ECHO, "single")
    server.install(ECHO, "batched", batch_size=8, max_batch_delay=20)
    server.install(CHANGES, "changes")
    server.install(COROUTINE, "coroutine", ASYNCHRONOUS)
    server.install(SLOW, "killed", batch_size=2, initial_workers=2)


def body_of(size):
    return random.Random(size).randbytes(size)


def ready_workers(server):
    workers = server.describe("killed")["workers"]
    return {worker["pid"] for worker in workers if worker["status"] == "READY"}


def pieces(body):
    for at in range(0, len(body), 70_000):
        yield body[at : at + 70_000]


@pytest.mark.parametrize("model", ["single", "batched", "coroutine"])
@pytest.mark.parametrize("way", ["length", "chunks", "gRPC"])
def test_bodies_of_all_sizes_come_through(server, model, way):
    def ask(size):
        body = body_of(size)
        if way == "gRPC":
            with connected(server, "inference") as client:
                return client.predict(model, input={"body": body}) == body
        data = body if way == "length" else pieces(body)
        return server.predict(model, data=data, headers=OCTETS).content == body

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(ask, SIZES * 2))


def test_a_handler_may_change_a_large_body(server):
    body = body_of(100_000)
    answer = server.predict("changes", data=body, headers=OCTETS)
    assert answer.content == b"!" + body[1:] + b"more"


def test_every_large_request_is_answered_while_workers_are_killed(server, wait_for):
    def ask(number):
        body = body_of(1_000_000 + number)
        answer = server.predict("killed", data=body, headers=OCTETS)
        return answer.status_code, answer.status_code != 200 or answer.content == body

    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(ask, number) for number in range(60)]
        for _ in range(3):
            before = ready_workers(server)
            os.kill(min(before), signal.SIGKILL)
            wait_for(lambda before=before: len(ready_workers(server) - before) == 1)
        results = [answer.result() for answer in answers]
    assert {status for status, _ in results} <= {200, 500, 503}
    assert all(is_right for _, is_right in results)
    assert [status for status, _ in results].count(200) > 40
