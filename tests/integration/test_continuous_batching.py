"""Requests that stay with a worker for as many steps as their answers take."""

import pytest

pytestmark = pytest.mark.integration

CONFIG = "continuousBatching: true\nbatchSize: 2\nmaxBatchDelay: 1\n"


@pytest.fixture
def ask(server, handlers, record, request):
    name = f"stepper-{abs(hash(request.node.name))}"
    server.install(handlers / "stepper.py", name, CONFIG)

    def send(client, until, **orders):
        order = {"name": client, "until": until, "record": str(record), **orders}
        return server.predict(name, json=order, stream=True)

    send.model = name
    return send


def test_an_answer_takes_as_many_steps_as_it_needs_and_its_input_is_sent_once(ask, record):
    answer = ask("a", 3)
    assert answer.headers["ts_stream_next"] == "true"
    assert answer.content == b"a1;a2;a3;"
    assert record.read_text().split() == ["a|", "|a", "|a"]


def test_an_answer_of_one_step_is_an_ordinary_one(ask):
    answer = ask("a", 1)
    assert answer.content == b"a1;"
    assert answer.headers["ts_stream_next"] == "false"
    assert answer.headers["content-length"] == "3"


def test_others_join_between_the_steps_up_to_the_batch_size(
    ask, record, server, make_gate, background
):
    gate = make_gate()
    first = background(lambda: ask("a", 4, gate=gate.path).content)
    gate.wait_entered()
    second = background(lambda: ask("b", 1).content)
    server.wait_queued(ask.model, 1)
    third = background(lambda: ask("c", 1).content)
    server.wait_queued(ask.model, 2)
    gate.open()
    assert [item.result() for item in (first, second, third)] == [b"a1;a2;a3;a4;", b"b1;", b"c1;"]
    assert record.read_text().split() == ["a|", "|a", "b|a", "c|a"]


def test_a_client_that_has_left_is_left_out_of_the_next_step(
    ask, record, server, make_gate, wait_for
):
    gate = make_gate()
    answer = ask("a", 1_000_000, gate=gate.path)
    gate.wait_entered()
    answer.close()
    opened = "marserve_open_requests"
    mine = lambda: [n for s, n in server.metrics(opened).items() if ask.model in s]  # noqa: E731
    wait_for(lambda: mine() == [0])
    gate.open()
    assert ask("b", 1).content == b"b1;"


def test_a_step_that_fails_fails_all_in_it_and_the_worker_lives(ask):
    answer = ask("a", 3, fail_at=0)
    assert answer.status_code == 503
    assert ask("b", 2).content == b"b1;b2;"


def test_describe_says_so(ask, server):
    assert server.describe(ask.model)["continuousBatching"] is True
