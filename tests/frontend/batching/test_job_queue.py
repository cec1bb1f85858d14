import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marserve.backend.protocol import Input
from marserve.frontend.batching.job_queue import JobQueue
from marserve.frontend.batching.jobs import Group, Job, Priority
from marserve.frontend.errors import NoWorker

HIGH, NORMAL, LOW = Priority


def fill(queue: JobQueue, *jobs: Job) -> None:
    for job in jobs:
        queue.append(job)


# -- capacity --------------------------------------------------------------------------------------


def test_a_seat_is_taken_until_its_job_leaves(make_job):
    queue = JobQueue(2)
    first, second = make_job(), make_job()
    assert queue.has_capacity(NORMAL, 2)
    assert not queue.has_capacity(NORMAL, 3)
    fill(queue, first, second)
    assert (queue.has_capacity(NORMAL), queue.free_capacity(NORMAL)) == (False, 0)
    queue.pop(1)
    assert (queue.has_capacity(NORMAL), queue.free_capacity(NORMAL)) == (True, 1)
    queue.discard(second)
    assert queue.free_capacity(NORMAL) == 2


def test_a_flood_of_one_class_leaves_the_seats_of_the_others_free(make_job):
    queue = JobQueue(2, {HIGH: 1})
    fill(queue, make_job(priority=LOW), make_job(priority=LOW))
    assert [queue.free_capacity(job) for job in Priority] == [1, 2, 0]


def test_fewer_seats_turn_nobody_out(make_job):
    queue = JobQueue(3)
    fill(queue, *(make_job() for _ in range(3)))
    queue.resize(1, {HIGH: 4})
    assert (len(queue), queue.free_capacity(NORMAL), queue.free_capacity(HIGH)) == (3, 0, 4)
    queue.pop(2)
    assert not queue.has_capacity(NORMAL)
    queue.pop(1)
    assert queue.has_capacity(NORMAL)


# -- the order -------------------------------------------------------------------------------------


def test_the_queue_knows_who_waits_longest(make_job):
    queue = JobQueue(9)
    fill(queue, make_job(3.0), make_job(4.0))
    assert (len(queue), queue.oldest_arrival) == (2, 3.0)
    queue.pop(1)
    assert (len(queue), queue.oldest_arrival) == (1, 4.0)


def test_who_is_overtaken_still_waits_longest(make_job):
    queue = JobQueue(9)
    old, urgent = make_job(3.0), make_job(5.0, order=2.0)
    fill(queue, old, urgent, make_job(4.0))
    assert queue.first is urgent
    assert queue.oldest_arrival == 3.0
    assert queue.pop(1) == [urgent]
    assert queue.oldest_arrival == 3.0
    queue.pop(9)
    fill(queue, make_job(6.0))
    assert queue.oldest_arrival == 6.0


def test_jobs_leave_in_order_and_those_nobody_waits_for_are_left_out(make_job):
    queue = JobQueue(9)
    jobs = [make_job() for _ in range(6)]
    fill(queue, *jobs)
    jobs[0].cancel()
    jobs[2].fail(NoWorker("expired"))
    jobs[2].future.exception()
    assert queue.pop(3) == [jobs[1], jobs[3], jobs[4]]
    assert queue.pop(3) == [jobs[5]]
    assert queue.pop(3) == []


@given(st.lists(st.integers(0, 5)))
def test_the_queue_is_in_order_and_fair_within_it(orders):
    queue = JobQueue(99)
    names = {}
    for name, order in enumerate(orders):
        job = Job(None, 0.0, lambda _answer: None)
        job.order = float(order)
        queue.append(job)
        names[job] = name
    assert [names[job] for job in queue.pop(99)] == sorted(
        range(len(orders)), key=orders.__getitem__
    )


def test_the_queue_can_be_put_into_another_order(make_job):
    queue = JobQueue(9)
    jobs = [make_job(float(arrived)) for arrived in range(4)]
    fill(queue, *jobs)
    queue.reorder(lambda job: -job.arrived // 2)
    assert [jobs[3].order, jobs[0].order] == [-2.0, 0.0]
    assert queue.oldest_arrival == 0.0
    queue.discard(jobs[3])
    assert queue.pop(9) == [jobs[1], jobs[2], jobs[0]]  # equals as they stood


def test_the_queue_tells_deadlines_by_place(make_queue):
    queue = make_queue([3.0, math.inf, 5.0])
    assert [queue.deadline_at(place) for place in range(3)] == [3.0, math.inf, 5.0]


def test_the_queue_knows_its_earliest_deadline_wherever_it_stands(make_job):
    queue = JobQueue(9)
    assert queue.earliest_deadline == math.inf
    fill(queue, make_job(order=0.0))
    assert queue.earliest_deadline == math.inf
    hurried = make_job(order=2.0, deadline=5.0)
    fill(queue, hurried, make_job(order=1.0, deadline=7.0))
    assert queue.earliest_deadline == 5.0
    queue.discard(hurried)
    assert queue.earliest_deadline == 7.0
    queue.pop(9)
    assert queue.earliest_deadline == math.inf
    fill(queue, make_job())
    assert queue.earliest_deadline == math.inf
    fill(queue, make_job(deadline=6.0))
    assert queue.earliest_deadline == 6.0


@pytest.mark.parametrize("orders", [(1.0, 2.0, 3.0), (1.0, 1.0, 1.0), (3.0, 1.0, 2.0)])
@pytest.mark.parametrize("leaves", [0, 1, 2])
def test_a_job_can_leave_the_queue_wherever_it_stands(make_job, orders, leaves):
    queue = JobQueue(9)
    jobs = [make_job(order=order) for order in orders]
    fill(queue, *jobs)
    queue.discard(jobs[leaves])
    queue.discard(jobs[leaves])
    queue.discard(make_job(order=2.0))
    left = sorted((job for job in jobs if job is not jobs[leaves]), key=lambda job: job.order)
    assert queue.pop(9) == left
    assert queue.free_capacity(NORMAL) == 9


def test_a_job_in_a_worker_has_no_place_to_give_up(make_job):
    queue = JobQueue(1)
    job = make_job()
    queue.append(job)
    queue.pop(1)
    job.dispatched = 1.0
    queue.discard(job)
    assert queue.free_capacity(NORMAL) == 1


def test_jobs_of_different_groups_never_share_a_batch(make_job):
    queue = JobQueue(9)
    predict, explain, describe = Group
    groups = [predict, predict, explain, explain, describe, describe, predict]
    jobs = [make_job(0.0, group) for group in groups]
    fill(queue, *jobs)
    taken = []
    while queue:
        assert queue.first.group is groups[len(jobs) - len(queue)]
        assert queue.first_runs_alone is (queue.first.group is describe)
        taken.append(queue.pop(9))
    assert taken == [jobs[:2], jobs[2:4], jobs[4:5], jobs[5:6], jobs[6:]]


def test_so_many_are_dropped_as_is_asked_whatever_they_are(make_job):
    queue = JobQueue(9)
    jobs = [make_job(), make_job(0.0, Group.EXPLAIN), make_job(), make_job()]
    fill(queue, *jobs)
    jobs[0].cancel()
    assert queue.drop(3) == jobs[1:3]
    assert queue.pop(9) == jobs[3:]
    assert queue.free_capacity(NORMAL) == 9


def test_who_was_in_a_crash_goes_first_and_alone(make_job):
    queue = JobQueue(2)
    waiting = [make_job(1.0), make_job(2.0)]
    fill(queue, *waiting)
    retried = [make_job(-1.0), make_job(-2.0)]
    for job in retried:
        job.dispatched, job.crashes = 3.0, 1
        queue.requeue(job)
    assert [job.dispatched for job in retried] == [None, None]
    assert len(queue) == 4
    for job in retried:
        assert queue.first is job
        assert queue.first_runs_alone
        assert queue.oldest_arrival == -2.0
        assert queue.pop(9) == [job]
    assert not queue.first_runs_alone
    assert queue.pop(9) == waiting


def test_a_job_that_runs_alone_again_can_leave_the_queue_too(make_job):
    queue = JobQueue(9)
    retried = make_job()
    retried.crashes = 1
    queue.requeue(retried)
    queue.discard(retried)
    queue.discard(retried)
    assert (len(queue), queue.free_capacity(NORMAL)) == (0, 9)


def test_the_queue_can_be_cleared(make_job):
    queue = JobQueue(9)
    jobs = [make_job() for _ in range(3)]
    fill(queue, *jobs)
    retried, suspected = make_job(), make_job()
    retried.crashes = 1
    queue.requeue(retried)
    suspected.is_suspected = True
    queue.append(suspected)
    assert queue.clear() == [retried, suspected, *jobs]
    assert (len(queue), queue.free_capacity(NORMAL)) == (0, 9)


def suspected(make_job: Callable[..., Job], order: float) -> Job:
    job = make_job(order, order=order)
    job.is_suspected = True
    return job


def test_suspected_jobs_go_alone_in_their_turn_and_do_not_cut_the_batches_of_others(make_job):
    queue = JobQueue(9)
    jobs = [make_job(order=order) for order in (0.0, 2.0, 3.0)]
    suspect = suspected(make_job, 1.0)
    fill(queue, jobs[0], suspect, *jobs[1:])
    assert not queue.first_runs_alone
    assert queue.pop(9) == jobs
    assert queue.first_runs_alone
    assert queue.pop(9) == [suspect]
    assert (len(queue), queue.free_capacity(NORMAL)) == (0, 9)


def test_a_flood_of_suspected_jobs_gets_every_other_batch_and_half_of_the_seats(make_job):
    queue = JobQueue(9)
    suspects = [suspected(make_job, 0.0) for _ in range(4)]
    fill(queue, *suspects)
    assert not queue.has_capacity_for_suspected(1)
    jobs = [make_job(order=1.0) for _ in range(4)]
    fill(queue, *jobs)
    left = [queue.pop(2) for _ in range(6)]
    assert left == [
        suspects[:1],
        jobs[:2],
        suspects[1:2],
        jobs[2:],
        suspects[2:3],
        suspects[3:],
    ]


def test_a_suspected_job_can_leave_the_queue(make_job):
    queue = JobQueue(2)
    suspect = suspected(make_job, 0.0)
    queue.append(suspect)
    queue.discard(suspect)
    queue.discard(suspect)
    assert (len(queue), queue.free_capacity(NORMAL)) == (0, 2)


def test_a_job_that_is_not_the_cause_of_a_crash_returns_to_its_place(make_job):
    queue = JobQueue(9)
    jobs = [make_job(order=order) for order in (0.0, 1.0, 2.0)]
    fill(queue, *jobs)
    [first] = queue.pop(1)
    queue.requeue(first)
    assert queue.pop(9) == jobs


@given(st.data())
def test_jobs_that_are_removed_together_leave_as_if_each_was_removed(data):
    """Many of few, and few of many; some in a worker, retried or suspected."""
    size = data.draw(st.sampled_from([3, 200]))
    queues = JobQueue(1000), JobQueue(1000)
    made = [[], []]
    for number in range(size):
        priority, kind = data.draw(st.sampled_from(Priority)), data.draw(st.integers(0, 3))
        for queue, jobs in zip(queues, made, strict=True):
            job = Job(Input(str(number), {}, []), 0.0, lambda _answer: None, priority=priority)
            job.order = float(number // 3)
            if kind == 1:
                job.crashes = 1
                queue.requeue(job)
            elif kind == 2:
                job.dispatched = 1.0
            else:
                job.is_suspected = kind == 3
                queue.append(job)
            jobs.append(job)
    chosen = data.draw(st.sets(st.integers(0, size - 1), max_size=size))
    for number in chosen:
        queues[0].discard(made[0][number])
    queues[1].discard_all([made[1][number] for number in chosen])
    assert [job.input.id for job in queues[0]] == [job.input.id for job in queues[1]]
    for priority in Priority:
        assert queues[0].free_capacity(priority) == queues[1].free_capacity(priority)
