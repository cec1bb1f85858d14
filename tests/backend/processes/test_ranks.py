import socket
import threading
from typing import Any

import pytest

from marserve.backend.connection import FrontendConnection
from marserve.backend.processes.ranks import LeaderConnection, connection_of
from marserve.backend.processes.runner import fetch_sockets, offer_sockets
from marserve.backend.protocol import (
    Input,
    Load,
    Loaded,
    LoadFailure,
    Part,
    Piece,
    Predict,
    Prediction,
    Reply,
    Trials,
)

SECONDS = 5.0


def load(**changes: object) -> Load:
    members = {
        "model_name": "m",
        "model_dir": "/m",
        "handler": "h",
        "batch_size": 1,
        "gpu_id": 6,
        "limit_max_image_pixels": True,
        "max_response_bytes": 1000,
        "server_version": "1",
    }
    return Load(**{**members, **changes})


def batch(number: int = 1) -> Predict:
    return Predict([Input("id", {}, [Part("body", "", b"x")])], number)


def offer(text: str, sock: socket.socket, ranks: int) -> str:
    return offer_sockets(text, sock, ranks, lambda _pid: None)


def fetch_connection(address: str, rank: int, *, to_all: bool = True) -> tuple[str, Any]:
    text, sockets = fetch_sockets(address, rank)
    return text, connection_of(rank, sockets, to_all=to_all)


class Team:
    """The frontend's connection to a worker, and those of its ranks."""

    def __init__(
        self, frontend: FrontendConnection, ranks: list[FrontendConnection], texts: set[str]
    ) -> None:
        self.frontend, self.ranks, self.texts = frontend, ranks, texts

    def load(self) -> None:
        """Have all ranks loaded."""
        self.frontend.send(load())
        for connection in self.ranks:
            connection.receive()
        for connection in reversed(self.ranks):
            connection.send(Loaded(threads=2))
        assert self.frontend.receive() == Loaded(threads=2)

    def close(self, rank: int) -> None:
        self.ranks[rank].detach().close()


@pytest.fixture
def make_team():
    opened = []

    def make(ranks=3, *, to_all=True):
        ours, theirs = socket.socketpair()
        opened.extend((ours, theirs))
        address = offer("told", theirs, ranks)
        fetched = [
            fetch_connection(address, rank, to_all=to_all) for rank in reversed(range(ranks))
        ][::-1]
        connections = [connection for _, connection in fetched]
        opened.extend(connection.detach() for connection in connections)
        for connection in connections:
            if isinstance(connection, LeaderConnection):
                opened.extend(each.detach() for each in connection._followers)
        frontend = FrontendConnection(ours)
        for sock in opened:
            if sock.fileno() >= 0:  # the other end of the frontend's went to rank 0
                sock.settimeout(SECONDS)
        return Team(frontend, connections, {text for text, _ in fetched})

    yield make
    for each in opened:
        each.close()


def test_each_rank_is_reported_the_same_and_counts_the_workers_devices_from_0(make_team):
    team = make_team()
    assert team.texts == {"told"}
    team.frontend.send(load())
    assert [connection.receive() for connection in team.ranks] == [
        load(gpu_id=rank) for rank in range(3)
    ]


def test_without_a_device_no_rank_has_one(make_team):
    team = make_team(2)
    team.frontend.send(load(gpu_id=None))
    assert [connection.receive() for connection in team.ranks] == [load(gpu_id=None)] * 2


@pytest.mark.parametrize(("to_all", "sizes"), [(True, []), (False, [1, 2])])
def test_ranks_that_share_each_batch_are_not_profiled_and_of_a_pipeline_the_first_is(
    make_team, to_all, sizes
):
    team = make_team(2, to_all=to_all)
    team.frontend.send(load(trials=Trials(sizes=[1, 2])))
    received = [connection.receive() for connection in team.ranks]
    assert received == [load(gpu_id=0, trials=Trials(sizes=sizes)), load(gpu_id=1)]


def test_a_rank_without_others_is_profiled(make_team):
    team = make_team(1)
    team.frontend.send(load(trials=Trials(sizes=[1, 2])))
    assert team.ranks[0].receive() == load(gpu_id=0, trials=Trials(sizes=[1, 2]))


def test_a_worker_is_loaded_when_all_its_ranks_are(make_team):
    team = make_team(2)
    team.frontend.send(load())
    for connection in team.ranks:
        connection.receive()
    answering = threading.Thread(target=team.ranks[0].send, args=(Loaded(threads=2),))
    answering.start()
    ours = team.frontend.detach()
    ours.setblocking(False)
    with pytest.raises(BlockingIOError):
        team.frontend.receive()
    team.ranks[1].send(Loaded(threads=3))
    ours.settimeout(SECONDS)
    assert team.frontend.receive() == Loaded(threads=2)
    answering.join()


def test_a_first_rank_that_does_not_load_says_so_at_once(make_team):
    team = make_team(2)
    team.frontend.send(load())
    team.ranks[0].receive()
    team.ranks[0].send(LoadFailure(500, "no weights"))
    assert team.frontend.receive() == LoadFailure(500, "no weights")


def test_all_ranks_get_a_batch_and_the_first_one_answers(make_team):
    team = make_team()
    team.load()
    for number in (1, 2):
        team.frontend.send(batch(number))
        assert [connection.receive() for connection in team.ranks] == [batch(number)] * 3
        for connection in reversed(team.ranks):
            connection.send(Piece([Prediction(b"piece")], [0], number=number))
            connection.send(Reply(predictions=[Prediction(b"end")], number=number))
        replies = [team.frontend.receive() for _ in range(2)]
        assert [each.predictions[0].body for each in replies] == [b"piece", b"end"]


def test_in_a_pipeline_the_first_rank_alone_gets_the_batches(make_team):
    team = make_team(2, to_all=False)
    team.load()
    team.frontend.send(batch())
    assert team.ranks[0].receive() == batch()
    team.ranks[1].detach().setblocking(False)
    with pytest.raises(BlockingIOError):
        team.ranks[1].receive()


def test_the_end_of_a_rank_is_the_end_of_the_first(make_team):
    team = make_team()
    team.load()
    team.close(2)
    with pytest.raises(ConnectionError, match="rank 2 has ended"):
        team.ranks[0].receive()


def test_the_end_of_the_frontend_is_reported_as_to_any_worker(make_team):
    team = make_team(2)
    team.load()
    team.frontend.detach().close()
    assert team.ranks[0].receive() is None


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"asynchronous": True}, "asyncCommunication"),
        ({"trials": Trials(validated_sizes=[2], must_validate=True)}, "validateBatching"),
    ],
)
def test_what_ranks_that_share_each_batch_cannot_do_is_refused(make_team, changes, setting):
    team = make_team(2)
    team.frontend.send(load(**changes))
    assert team.ranks[0].receive() is None
    failure = team.frontend.receive()
    assert isinstance(failure, LoadFailure)
    assert (failure.code, failure.permanent) == (500, True)
    assert setting in failure.message


@pytest.mark.parametrize("rank", [0, 1])
def test_a_socket_is_handed_out_once(rank):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        address = offer("x", theirs, 2)
        _, connection = fetch_connection(address, 0)
        connection.detach().close()
        for other in connection._followers:
            other.detach().close()
        if rank == 1:  # all have theirs: nobody is there any more
            fetch_connection(address, 1)[1].detach().close()
        with pytest.raises(OSError):
            fetch_connection(address, 0)
        if rank == 0:
            fetch_connection(address, 1)[1].detach().close()


def test_more_ranks_than_one_message_can_serve_are_refused():
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(ValueError, match="at most 250"):
        offer("", theirs, 1000)
