"""What clients of a listener may keep in memory."""

import asyncio

import pytest

from marserve.frontend.errors import TooMuchInFlight
from marserve.frontend.security.usage import RequestMemory, Usage


def test_bytes_are_refused_beyond_a_limit_and_counted_exactly():
    reached = []
    usage = Usage(100, 60, lambda limit, _what: reached.append(limit))
    one, other = usage.client("1.1.1.1"), usage.client("2.2.2.2")
    usage.hold(one, 60)
    with pytest.raises(TooMuchInFlight, match="max_client_bytes_in_flight"):
        usage.hold(one, 1)
    usage.hold(other, 40)
    with pytest.raises(TooMuchInFlight, match="max_bytes_in_flight"):
        usage.hold(other, 1)
    assert reached == ["max_client_bytes_in_flight", "max_bytes_in_flight"]
    assert (usage.bytes, one.bytes, other.bytes) == (100, 60, 40)


def test_answers_are_never_refused_but_fill_a_listener():
    usage = Usage(100)
    client = usage.client("1.1.1.1")
    usage.add(client, 101)
    assert usage.is_full
    with pytest.raises(TooMuchInFlight):
        usage.hold(client, 0)
    usage.add(client, -1)
    assert not usage.is_full


def test_connections_from_one_address_share_what_they_use():
    usage = Usage()
    client = usage.client("1.1.1.1")
    client.connections += 1
    assert usage.client("1.1.1.1") is client
    del client
    assert usage.client("1.1.1.1").connections == 0


def test_clients_at_a_unix_socket_have_the_limit_of_the_listener_only():
    usage = Usage(100, 10)
    client = usage.client("")
    usage.hold(client, 50)
    assert usage.client("") is not client


def test_a_client_knows_what_share_of_its_limits_is_used():
    usage = Usage(100, 50)
    one, other = usage.client("1.1.1.1"), usage.client("2.2.2.2")
    usage.add(one, 40)
    assert (usage.share(one), usage.share(other)) == (0.8, 0.4)
    assert Usage().share(one) == 0.0


def test_the_memory_of_a_request_is_released_at_its_end():
    usage = Usage(100)
    client = usage.client("1.1.1.1")
    memory = RequestMemory(usage, client)
    memory.hold(60)
    memory.release(20)
    with pytest.raises(TooMuchInFlight):
        memory.hold(61)
    assert (usage.bytes, client.bytes, memory.bytes) == (40, 40, 40)
    memory.end()
    assert (usage.bytes, client.bytes, memory.bytes) == (0, 0, 0)


def test_an_answer_may_exceed_a_limit_and_keeps_others_out():
    usage = Usage(100_000)
    first, second = (RequestMemory(usage, usage.client(each)) for each in ("1.1.1.1", "2.2.2.2"))
    first.hold_answer(200_000)
    for refused in (second.hold, second.hold_answer):
        with pytest.raises(TooMuchInFlight):
            refused(100_000)
    with pytest.raises(TooMuchInFlight):
        second.hold(0)
    second.hold_answer(10)  # small ones are not counted
    assert (usage.bytes, second.bytes) == (200_000, 0)
    first.end()
    second.hold_answer(200_000)


def test_a_vital_request_may_have_a_small_body_and_any_answer():
    usage = Usage(100_000)
    other, memory = (RequestMemory(usage, usage.client("1.1.1.1")) for _ in range(2))
    other.hold_answer(200_000)
    memory.is_vital = True
    memory.hold(1000)
    with pytest.raises(TooMuchInFlight):
        memory.hold(100_000)
    memory.hold_answer(100_000)
    assert usage.bytes == 301_000
    memory.end()
    with pytest.raises(TooMuchInFlight):
        memory.hold(1000)  # of the next request


def test_nothing_is_counted_for_a_client_that_has_left():
    usage = Usage(100)
    memory = RequestMemory(usage, usage.client("1.1.1.1"))
    memory.hold(60)
    memory.close()
    memory.hold(101)
    memory.release(60)
    memory.end()
    assert (usage.bytes, memory.bytes) == (0, 0)


def test_what_work_adds_to_memory_is_counted_and_limited():
    closed = []

    def grow(pieces):
        try:
            for _ in range(pieces):
                yield 30
        finally:
            closed.append(True)
        return "done"

    async def scenario():
        usage = Usage(100)
        memory = RequestMemory(usage, usage.client("1.1.1.1"))
        assert await memory.run(grow(2)) == "done"
        assert (usage.bytes, closed) == (60, [True])
        with pytest.raises(TooMuchInFlight):
            await memory.run(grow(1000))
        assert (usage.bytes, closed) == (90, [True, True])

    asyncio.run(scenario())
