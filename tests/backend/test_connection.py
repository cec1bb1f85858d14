import socket
import threading

import pytest

from marserve.backend.connection import FrontendConnection
from marserve.backend.framing import Decoder
from marserve.backend.protocol import Message, Prediction, Reply


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param([5_000_000], id="larger than the socket's buffer"),
        pytest.param([20_000, 5, 5_000_000, 0, 17_000], id="small and large"),
        pytest.param([17_000] * 1100, id="more than one system call takes"),
    ],
)
def test_large_answers_arrive_whole_and_in_order(sizes):
    ours, theirs = socket.socketpair()
    bodies = [bytes([place % 251]) * size for place, size in enumerate(sizes)]
    sent = Reply(predictions=[Prediction(body) for body in bodies])
    decoder, received = Decoder(1 << 30), list[Message]()
    with ours, theirs:
        sender = threading.Thread(target=FrontendConnection(theirs).send, args=(sent,))
        sender.start()
        while not received:
            received += decoder.received(ours.recv_into(decoder.buffer))
        sender.join()
    assert received == [sent]
    assert decoder.is_between_frames
