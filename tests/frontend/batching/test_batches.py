import json
import time

import pytest

from marserve.backend.protocol import Piece, Prediction, Reply
from marserve.frontend.batching.batches import Batch, History, Reason
from marserve.frontend.errors import WorkerDied


def test_a_batch_answers_each_job_with_its_own_prediction(make_job):
    jobs = [make_job(), make_job()]
    batch = Batch(jobs, 0.0)
    assert batch.inputs == [job.input for job in jobs]
    batch.deliver([Prediction(b"a"), Prediction(b"b")])
    assert [job.future.result().body for job in jobs] == [b"a", b"b"]
    batch.fail(WorkerDied())
    assert [job.future.exception() for job in jobs] == [None, None]


def test_a_failed_batch_fails_every_job(make_job):
    jobs = [make_job(), make_job()]
    error = WorkerDied()
    Batch(jobs, 0.0).fail(error)
    assert [job.future.exception() for job in jobs] == [error, error]


def test_as_many_predictions_as_jobs(make_job):
    jobs = [make_job(), make_job()]
    with pytest.raises(ValueError, match="shorter"):
        Batch(jobs, 0.0).deliver([Prediction(b"a")])


def test_pieces_go_to_the_jobs_at_their_places(make_job):
    jobs = [make_job() for _ in range(3)]
    pieces = [Prediction(b"c"), Prediction(b"a")]
    Batch(jobs, 0.0).push(Piece(pieces, [2, 0]))
    assert [job.stream and bytes(job.stream.first.body) for job in jobs] == [b"a", None, b"c"]


def test_a_batch_runs_as_many_rows_as_it_has_jobs_or_more(make_job):
    jobs = [make_job(5.0), make_job(3.0)]
    batch = Batch(jobs, 7.0)
    assert (len(batch), batch.run_as, batch.waited) == (2, 2, 4.0)
    assert Batch(jobs, 0.0, run_as=8).run_as == 8


def test_a_record_becomes_a_document(make_job, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 1_700_000_001.0)
    history = History(clock=lambda: 1001.0)
    jobs = [make_job(1000.4876544), make_job(1000.49)]
    batch = Batch(jobs, 1000.5, Reason.WORK_CONSERVING, run_as=4, predicted=0.02, held=0.001)
    batch.worker_id = 9001
    batch.ran(Reply(handler_started=1000.502, handler_ms=20.5))
    history.add(batch, 0.025, succeeded=True)
    batch.release()
    [document] = history.documents()
    assert document == {
        "closedAt": 1_700_000_000_500,
        "size": 2,
        "ranAs": 4,
        "reason": "work_conserving",
        "oldestWaitedMs": 12.346,
        "heldMs": 1.0,
        "predictedMs": 20.0,
        "handlerMs": 20.5,
        "tookMs": 25.0,
        "workerId": 9001,
        "succeeded": True,
    }
    json.dumps(document)


def test_a_batch_keeps_its_size_and_the_bytes_that_were_read_but_no_jobs(make_job):
    read, unread = (Batch([make_job(), make_job()], 0.0) for _ in range(2))
    read.read_sizes()
    expected = [job.input.size for job in read.jobs]
    for batch in (read, unread):
        batch.release()
        batch.release()
    assert (len(read), read.jobs, list(read.request_bytes)) == (2, (), expected)
    assert (len(unread), list(unread.request_bytes)) == (2, [])


def test_what_was_not_predicted_is_null(make_job):
    history = History()
    history.add(Batch([make_job()], 0.0), 1.0, succeeded=False)
    assert next(history.documents())["predictedMs"] is None


def test_the_last_batches_are_remembered_the_newest_last(make_job):
    history = History()
    jobs = [make_job()]
    for rows in range(1, 601):
        history.add(Batch(jobs, 0.0, run_as=rows), 1.0, succeeded=True)
    assert len(history) == 512
    assert [record["ranAs"] for record in history.documents()] == [*range(89, 601)]


def test_every_reason_has_its_own_word():
    assert len({reason.value for reason in Reason}) == len(Reason) == len(Reason.__members__)
