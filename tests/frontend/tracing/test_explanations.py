"""Each planted cause is the one that the sentence names."""

from collections.abc import Callable

import pytest

from marserve.backend.protocol import Input, Part, Reply
from marserve.frontend.batching.batches import Batch, Reason
from marserve.frontend.batching.jobs import Job
from marserve.frontend.tracing.explanations import Facts, Shares, explain, server_timing
from marserve.frontend.tracing.time_lines import (
    CANCELLED,
    EXPIRED,
    FAILED,
    REFUSED,
    TimeLine,
    TimeLines,
)
from marserve.frontend.tracing.worker_history import WorkerHistory

MODEL = TimeLines().of_model("m", "1.0")
MakeBatch = Callable[..., Batch]


@pytest.fixture
def make_batch():
    def make(
        closed,
        handler,
        *,
        worker=9000,
        hand_over=0.0,
        sizes=(10, 10),
        held=0.0,
        reason=Reason.WORK_CONSERVING,
    ):
        inputs = [Input("id", {}, [Part("body", "", bytes(size))]) for size in sizes]
        jobs = [Job(each, 0.0, None) for each in inputs]
        batch = Batch(jobs, closed, reason, held=held, worker_id=worker)
        batch.ran(Reply(handler_started=closed + hand_over, handler_ms=handler * 1000))
        batch.read_sizes()
        assert list(batch.request_bytes) == list(sizes)
        return batch

    return make


def sent(batch: Batch, took: float, **more: object) -> TimeLine:
    return TimeLine("id", MODEL, 0.0, 0.0, batch, took, size=10)._replace(**more)


def usual(make_batch: MakeBatch, *, worker: int = 9001, seconds: float = 0.05) -> list[Batch]:
    return [make_batch(closed, seconds, worker=worker) for closed in range(10)]


def test_shares_are_in_order_and_add_up(make_batch):
    batch = make_batch(0.5, 0.2, hand_over=0.1, held=0.3)
    line = sent(batch, 1.0, queued=0.1)
    shares = Shares.of(line)
    assert shares == pytest.approx((0.1, 0.1, 0.3, 0.1, 0.2, 0.2))
    assert sum(shares) == pytest.approx(line.took)
    assert server_timing(line) == (
        "receiving;dur=100.000, waiting;dur=100.000, batching;dur=300.000, hand_over;dur=100.000, "
        "handler;dur=200.000, answering;dur=200.000, total;dur=1000.000"
    )


@pytest.mark.parametrize(
    ("states", "reason"),
    [
        ([(1, "ready"), (2, "failed"), (3, "starting")], "2 of 3 were not ready"),
        ([(1, "ready"), (2, "ready")], "all 2 ready were busy"),
        ([(1, "ready")], "the 1 ready was busy"),
        ([], "there was none"),
    ],
)
def test_a_wait_is_explained_by_the_workers(states, reason, make_batch):
    workers = WorkerHistory(lambda: 0.0)
    for worker, state in states:
        workers.changed(worker, state)
    found = explain(sent(make_batch(0.9, 0.05), 1.0), Facts(workers=workers))
    assert found.startswith(f"It waited 900 ms of 1000 ms for a worker: {reason}")


def test_a_retry_is_explained_by_the_death_of_its_worker(make_batch):
    found = explain(sent(make_batch(0.9, 0.05), 1.0, attempts=2), Facts())
    assert "the worker that had it died, and it ran 2 times" in found


def test_a_held_batch_is_named_with_its_reason(make_batch):
    batch = make_batch(0.9, 0.05, held=0.8, reason=Reason.WINDOW)
    assert explain(sent(batch, 1.0), Facts()) == (
        "It was held 800 ms of 1000 ms for a larger batch (closed by: window)."
    )


def test_a_slow_upload_is_the_clients(make_batch):
    found = explain(sent(make_batch(0.9, 0.05), 1.0, queued=0.9), Facts())
    assert found.startswith("Its 10 bytes took 900 ms of 1000 ms to arrive")


def test_a_worker_that_does_not_read_was_stopped(make_batch):
    found = explain(sent(make_batch(0.0, 0.05, hand_over=0.9), 1.0), Facts())
    assert found.startswith("Worker 9000 began with it after 900 ms of 1000 ms: its process was")


def test_shares_end_with_the_answer_of_a_request_that_the_handler_had_later(make_batch):
    line = sent(make_batch(0.5, 0.05, hand_over=6.0), 1.0, outcome=EXPIRED)
    assert Shares.of(line) == pytest.approx((0.0, 0.5, 0.0, 0.5, 0.0, 0.0))


def test_the_size_of_a_batch_that_is_not_known_is_not_a_reason(make_batch):
    batch = make_batch(0.001, 0.9)
    batch.release()
    line = sent(batch, 1.0, size=2_000_000)
    assert "its input has 2.0 MB" in explain(line, Facts(usual(make_batch), [1000]))


def test_a_large_input_in_the_batch_is_named(make_batch):
    batch = make_batch(0.001, 0.9, sizes=(10, 8_100_000))
    facts = Facts(usual(make_batch), [12_000] * 9)
    assert explain(sent(batch, 1.0), facts) == (
        "The handler took 900 ms of 1000 ms for a batch of 2, usually 50 ms; another request's "
        "input has 8.1 MB, usually 12.0 kB."
    )
    own = sent(batch, 1.0, size=8_100_000)
    assert "; its input has 8.1 MB" in explain(own, facts)


def test_a_slow_worker_is_told_from_one_that_was_stopped_once(make_batch):
    batch = make_batch(5.0, 0.9, worker=9000)
    others = usual(make_batch)
    slow = [make_batch(closed, 0.9, worker=9000) for closed in range(5)]
    assert "worker 9000 is slow in all its batches, others are not" in explain(
        sent(batch, 6.0, queued=5.0, arrived=5.0), Facts([*others, *slow], [10])
    )
    well = usual(make_batch, worker=9000)
    assert "so worker 9000 was stopped or had no processor" in explain(
        sent(batch, 6.0, queued=5.0, arrived=5.0), Facts([*others, *well], [10])
    )


def test_a_handler_that_takes_its_usual_time_is_not_suspicious(make_batch):
    found = explain(sent(make_batch(0.0, 0.06), 0.06), Facts(usual(make_batch), [10]))
    assert found == "The handler took 60 ms of 60 ms for a batch of 2."


def test_requests_to_other_models_are_named(make_batch):
    nested = [
        TimeLine("n", TimeLines().of_model("detector", "1"), 0.0, 0.0, None, took)
        for took in (0.2, 0.5)
    ]
    calls = explain(sent(make_batch(0.001, 0.9), 1.0, nested=nested), Facts())
    assert calls.endswith("; 700 ms in 2 requests to other models, the longest 500 ms to detector.")
    workflow = TimeLine("w", MODEL, 0.0, 0.0, None, 1.0, nested=nested)
    assert explain(workflow, Facts()) == (
        "Of 1000 ms, 700 ms were in 2 nodes, the longest in detector: 500 ms."
    )


def test_what_has_no_answer_is_explained_first(make_batch):
    line = sent(make_batch(0.9, 0.05), 1.0)
    assert explain(line._replace(outcome=FAILED, error="ValueError: no"), Facts()) == (
        "It failed after 1000 ms: ValueError: no"
    )
    assert explain(line._replace(outcome=FAILED, status=503), Facts()).endswith(": status 503")
    assert explain(line._replace(outcome=REFUSED, error="The queue is full."), Facts()) == (
        "The queue is full."
    )
    assert explain(line._replace(outcome=EXPIRED), Facts()).startswith(
        "It expired after 1000 ms. It waited 900 ms"
    )
    assert explain(line._replace(outcome=CANCELLED), Facts()).startswith("The client left after")
