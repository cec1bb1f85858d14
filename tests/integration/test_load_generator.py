"""The load generator against servers that behave as servers do, and as they should not."""

import asyncio
import contextlib
import itertools

import pytest

from marserve.tools.bench.errors import BenchError
from marserve.tools.bench.generator.destination import Destination
from marserve.tools.bench.generator.load import Load
from marserve.tools.bench.generator.processes import Listener, generate
from marserve.tools.bench.generator.window import measured_part

pytestmark = pytest.mark.integration

REQUEST = b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nbody"
FINE = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
LAST = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok"
ENDLESS = b"HTTP/1.1 200 OK\r\n\r\nok"  # ends with the connection


class StandIn:
    """A server; ``answer`` is called for each request and says what to send and whether to go on.

    Attributes:
        open: Connections now.
        max_open: Connections at a time, at most.
        requests: That came.
    """

    def __init__(self, answer):
        self.answer = answer
        self.open = self.max_open = self.requests = 0

    @contextlib.asynccontextmanager
    async def served(self):
        """Where it is served; who is still there at the end is sent away."""
        self.connections = set()
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self.server.sockets[0].getsockname()[1]
        try:
            yield Destination(f"http://127.0.0.1:{port}")
        finally:
            self.server.close()
            for task in self.connections:
                task.cancel()
            await asyncio.gather(*self.connections, return_exceptions=True)
            await self.server.wait_closed()

    async def _serve(self, reader, writer):
        self.connections.add(asyncio.current_task())
        self.open += 1
        self.max_open = max(self.max_open, self.open)
        try:
            await self._answer_all(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # it ends here anyway, and a task of asyncio's server must not be cancelled
        finally:
            self.open -= 1
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _answer_all(self, reader, writer):
        keeps_alive = True
        while keeps_alive:
            await reader.readexactly(len(REQUEST))
            self.requests += 1
            reply, keeps_alive = await self.answer(self.requests)
            writer.write(reply)
            await writer.drain()


def run(load, answer, processes=1, listener=None):
    """The part of the run that counts, its record, and the server."""

    async def together():
        stand_in = StandIn(answer)
        async with stand_in.served() as destination:
            record, warm = await generate(
                load, destination, [REQUEST], processes=processes, listener=listener
            )
        return measured_part(record, load, warm), record, stand_in

    return asyncio.run(together())


async def fine(_number):
    return FINE, True


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("load", [Load(clients=4, seconds=0.3), Load(rate=300, seconds=0.3)])
def test_all_is_well(load, processes):
    part, record, server = run(load, fine, processes)
    assert part.errors == {}
    assert len(part.latencies) > 30
    assert part.latencies == sorted(part.latencies)
    assert server.max_open >= processes
    if load.clients:
        assert server.max_open == load.clients
    else:
        assert len(record.lateness) == len(part.latencies)


@pytest.mark.parametrize("reply", [LAST, ENDLESS])
@pytest.mark.parametrize("load", [Load(clients=4, seconds=0.3), Load(rate=200, seconds=0.3)])
def test_a_server_that_wants_a_connection_for_each_request_gets_it(load, reply):
    async def answer(_number):
        return reply, False

    part, _, _ = run(load, answer)
    assert part.errors == {}
    assert len(part.latencies) > 20


def test_a_server_that_ends_connections_when_they_are_idle_gets_others():
    async def answer(_number):
        return FINE, False  # it does not say that it will hang up, and does so behind the answer

    load = Load(rate=50, arrivals="uniform", requests=40, max_connections=10)
    part, _, server = run(load, answer)
    assert part.errors == {}
    assert server.max_open <= 10


@pytest.mark.parametrize("load", [Load(clients=4, requests=60), Load(rate=200, requests=60)])
def test_a_server_that_hangs_up_without_a_word_is_counted(load):
    async def answer(number):
        return (b"", False) if number % 3 == 0 else (FINE, True)

    part, _, _ = run(load, answer)
    assert len(part.latencies) + sum(part.errors.values()) == 60
    assert set(part.errors) <= {"connection closed", "connection reset"}
    assert 10 <= sum(part.errors.values()) <= 30


@pytest.mark.parametrize(("requests", "counted"), [(30, 32), (32, 32), (33, 40)])
def test_requests_are_made_up_to_whole_rounds(requests, counted):
    part, _, _ = run(Load(clients=4, requests=requests, step=8), fine)
    assert len(part.latencies) == counted


@pytest.mark.parametrize("load", [Load(clients=2, requests=4), Load(rate=100, requests=4)])
def test_who_is_never_answered_gives_up(load):
    async def answer(_number):
        await asyncio.sleep(5)
        return FINE, True

    patient = Load(**{**vars(load), "timeout": 0.4})
    part, _, _ = run(patient, answer)
    assert part.latencies == []
    assert set(part.errors) == {"timeout"}


def test_a_request_in_flight_when_the_load_gives_up_is_a_timeout():
    async def answer(number):
        await asyncio.sleep(0.4 if number == 1 else 30)
        return FINE, True

    # The second client's requests are due between the first one's, so one is always in flight.
    part, record, _ = run(Load(clients=2, requests=40, timeout=0.6), answer)
    assert record.stopped == "it gave no answer for 1.2 s"
    assert set(part.errors) == {"timeout"}


def test_an_open_loop_opens_as_many_connections_as_it_needs_and_no_more_than_it_may():
    async def slow(_number):
        await asyncio.sleep(0.2)
        return FINE, True

    part, _, server = run(Load(rate=100, arrivals="uniform", requests=30), slow)
    assert part.errors == {}
    assert 15 <= server.max_open <= 30  # Little's law: 100/s times 0.2 s, more on a busy machine
    limited = Load(rate=100, arrivals="uniform", requests=30, max_connections=3)
    part, _, server = run(limited, slow)
    assert part.errors == {}
    assert server.max_open == 3
    assert part.latencies[-1] > 1.5  # the last of 30 waits for nine others on its connection


def test_what_cannot_even_be_sent_counts():
    async def stuck(_number):
        await asyncio.sleep(5)
        return FINE, True

    load = Load(rate=100, arrivals="uniform", requests=20, max_connections=2, timeout=0.5)
    part, _, _ = run(load, stuck)
    assert part.errors["timeout"] >= 2
    assert part.errors["not sent"] > 0
    assert sum(part.errors.values()) == 20


def test_the_warm_up_does_not_count():
    slow_ones = itertools.chain([0.3] * 4, itertools.repeat(0))

    async def answer(_number):
        await asyncio.sleep(next(slow_ones))
        return FINE, True

    part, _, _ = run(Load(clients=4, seconds=0.2, warm_up=0.4), answer)
    assert part.latencies[-1] < 0.3


def test_who_waits_is_told_how_far_it_is():
    events = []

    class Recorder(Listener):
        def measuring(self):
            events.append("measuring")

        def counted(self, count):
            events.append(count)

    run(Load(clients=2, seconds=0.7, warm_up=0.1), fine, processes=2, listener=Recorder())
    first, *counts = events
    assert first == "measuring"
    assert counts == sorted(counts)
    assert counts[-1] > 0


def test_nobody_is_there():
    with pytest.raises(BenchError, match="connection refused"):
        asyncio.run(generate(Load(clients=1, seconds=1), Destination("http://127.0.0.1:1"), []))


def test_a_server_that_goes_away_ends_the_run():
    async def leave(_number):
        stand_in.server.close()
        return b"", False

    async def together():
        async with stand_in.served() as destination:
            record, _ = await generate(Load(clients=2, seconds=100), destination, [REQUEST])
        return record

    stand_in = StandIn(leave)
    assert asyncio.run(together()).stopped == "connection refused"
