"""Answers that come in pieces, from the handler's call to the chunks on the wire."""

import json

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.quick]


@pytest.fixture(scope="module")
def streamer(server, handlers):
    server.install(handlers / "streamer.py", "streamer", batch_size=2, max_batch_delay=1)
    return "streamer"


@pytest.fixture(scope="module")
def pair(server, handlers):
    server.install(handlers / "streamer.py", "pair", batch_size=2, max_batch_delay=60_000)
    return "pair"


def ask(server, model, **orders):
    return server.predict(model, json=orders, stream=True)


def raw_request(model, version="HTTP/1.1", **orders):
    body = json.dumps(orders).encode()
    head = f"POST /predictions/{model} {version}\r\nHost: x\r\nContent-Type: application/json\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body


def test_every_piece_is_a_chunk_and_arrives_before_the_next_is_made(server, streamer, make_gate):
    gate = make_gate()
    answer = ask(server, streamer, id="a", pieces=2, gate=gate.path)
    assert answer.status_code == 200
    assert answer.headers["transfer-encoding"] == "chunked"
    assert answer.headers["ts_stream_next"] == "true"
    assert "content-length" not in answer.headers
    chunks = answer.iter_content(None)
    assert next(chunks) == b"a0;"
    gate.open()
    assert b"".join(chunks) == b"aend"


def test_a_connection_lives_on_after_a_stream(server, streamer):
    request = raw_request(streamer, id="a", pieces=3)
    with server.connect("inference") as connection:
        for _ in range(2):
            connection.sendall(request)
            received = b""
            while not received.endswith(b"\r\n0\r\n\r\n"):
                received += connection.recv(65536)
            assert received.count(b"HTTP/1.1 200") == 1
            assert received.endswith(b"3\r\na0;\r\n3\r\na1;\r\n4\r\naend\r\n0\r\n\r\n")


def test_http_1_0_gets_the_pieces_without_chunks(server, streamer):
    received = server.exchange("inference", raw_request(streamer, "HTTP/1.0", id="a", pieces=2))
    head, _, body = received.partition(b"\r\n\r\n")
    assert body == b"a0;aend"
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head


def test_the_requests_of_a_batch_stream_side_by_side(server, pair, together):
    answers = together([lambda item=item: ask(server, pair, id=item, pieces=3) for item in "ab"])
    assert [answer.content for answer in answers] == [b"a0;a1;aend", b"b0;b1;bend"]


@pytest.mark.parametrize("fail", ["raise", "exit"])
def test_an_answer_that_breaks_off_never_looks_complete(server, streamer, fail):
    received = server.exchange("inference", raw_request(streamer, id="a", pieces=2, fail=fail))
    assert received.endswith(b"3\r\na0;\r\n")
    assert ask(server, streamer, id="b", pieces=2).content == b"b0;bend"


def test_a_client_that_leaves_does_not_hurt_its_batch_mate(
    server, pair, make_gate, background, wait_for, read_to_end
):
    gate = make_gate()
    other = background(ask, server, pair, id="b", pieces=2)

    def open_requests():
        samples = server.metrics("marserve_open_requests")
        return [count for series, count in samples.items() if '"pair"' in series]

    with server.connect("inference") as leaver:
        leaver.sendall(raw_request(pair, id="a", pieces=2, gate=gate.path))
        assert b"a0;" in read_to_end(leaver, b"a0;")
    wait_for(lambda: open_requests() == [1])
    gate.open()
    assert other.result().content == b"b0;bend"
    wait_for(lambda: open_requests() == [0])


def test_each_piece_gives_the_worker_its_time_again(server, handlers, make_gate):
    server.install(handlers / "streamer.py", "timed", "responseTimeout: 1\n")
    gate = make_gate()  # never opened
    request = raw_request("timed", id="a", pieces=2, gate=gate.path)
    assert server.exchange("inference", request).endswith(b"3\r\na0;\r\n")
    assert ask(server, "timed", id="b", pieces=3).content == b"b0;b1;bend"


def test_latency_is_counted_when_the_last_piece_is_gone(server, handlers):
    server.install(handlers / "streamer.py", "counted")
    assert ask(server, "counted", id="a", pieces=2).content == b"a0;aend"
    counted = server.metrics("ts_inference_latency_microseconds")
    assert any(value > 0 for series, value in counted.items() if '"counted"' in series)


def test_a_client_who_takes_nothing_is_given_up_when_too_much_waits(server, wait_for):
    source = (
        "def handle(data, context):\n"
        "    for _ in range(100 if data else 0):\n"
        "        context.send_intermediate([bytes(1 << 20)] * len(data))\n"
        "    return data and ['end'] * len(data)\n"
    )
    server.install(source, "flood")

    def open_requests():
        samples = server.metrics("marserve_open_requests")
        return [count for series, count in samples.items() if '"flood"' in series]

    with server.connect("inference") as lazy:
        lazy.sendall(raw_request("flood"))
        server.wait_logged("ts_log.log", "An answer was broken off: the client is too slow")
        wait_for(lambda: open_requests() == [0])
