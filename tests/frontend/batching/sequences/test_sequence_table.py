"""The table of sequences, without workers or an event loop; time passes when a test says so."""

import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from marserve.frontend.batching.sequences.sequence_table import SequenceTable
from marserve.frontend.batching.sequences.stateful_sequence import (
    MADE_HERE,
    Reason,
    SequenceLimits,
    SequencesFull,
    StatefulSequence,
)
from marserve.frontend.errors import NoWorker, Overloaded, SequenceOver, ServeError

LIMITS = SequenceLimits(max_idle=10.0, max_age=100.0, max_wait=30.0, max_sequences=4, max_queue=3)


class Job:
    """A job, and everything that became of it."""

    sequence: StatefulSequence

    def __init__(self, name: str = "", *, starts: bool = False, ends: bool = False) -> None:
        self.name = name
        self.starts, self.ends = starts, ends
        self.dispatched: float | None = None
        self.is_answered = self.has_left = self.is_first = False
        self.answers: list[ServeError | str] = []

    def __repr__(self) -> str:
        return f"Job({self.name})"

    def begin_sequence(self) -> None:
        self.is_first = True

    def fail(self, error: ServeError) -> None:
        self.answers.append(error)

    @property
    def error(self) -> ServeError | str:
        (answer,) = self.answers
        return answer


class Worker:
    """Slots, a queue, and what its handler was told."""

    def __init__(self, play: "Play") -> None:
        self.play = play
        self.open: dict[StatefulSequence, None] = {}
        self.is_closing = self.is_closed = self.is_dead = self.refuses = False
        self.queue: list[Job] = []
        self.in_hand: list[Job] = []
        self.told: list[str] = []

    @property
    def is_accepting(self) -> bool:
        return not self.is_closing and not self.is_dead

    def put(self, job: Any) -> None:
        if self.refuses:
            raise Overloaded(1.0)
        self.queue.append(job)

    def discard(self, job: Any) -> None:
        if job in self.queue:
            self.queue.remove(job)

    def end_sequence(self, sequence_id: str, reason: Reason) -> None:
        self.told.append(f"{sequence_id} {reason.value}")

    def on_closed(self) -> None:
        self.is_closed = True

    # What a test does with it

    def run(self, *jobs: Job) -> None:
        """Send jobs to the worker, by default all."""
        for job in jobs or list(self.queue):
            self.queue.remove(job)
            job.dispatched = self.play.now
            self.in_hand.append(job)
            if job.is_first:
                self.told.append(f"{job.sequence.id} begins")

    def answer(self, *jobs: Job) -> None:
        """Answer jobs that it has, by default all."""
        for job in jobs or list(self.in_hand):
            self.in_hand.remove(job)
            job.is_answered = not (job.has_left or job.answers)
            if job.is_answered:
                job.answers.append("done")
            self.play.table.finished(job)

    def fail(self, *jobs: Job) -> None:
        """Fail jobs that it has, as a handler does that raises."""
        for job in jobs or list(self.in_hand):
            self.in_hand.remove(job)
            if job.is_first:
                self.told.append(f"{job.sequence.id} fails")
            self.play.table.finished(job, failed=True)
            if not job.answers and not job.has_left:
                job.answers.append("failed")

    def die(self) -> None:
        self.is_dead = True
        reason = Reason.WORKER_STOPPED if self.is_closing else Reason.WORKER_DIED
        self.play.table.lose(self, "It died.", reason)
        for job in self.in_hand:
            if not job.answers and not job.has_left:
                job.answers.append("lost")
            self.play.table.finished(job)
        self.in_hand.clear()


class Play:
    """A table, its clock, and its workers."""

    def __init__(self, workers: int = 1, slots: int = 4, limits: SequenceLimits = LIMITS) -> None:
        self.now = 1000.0
        self.wakes_at = math.inf
        self.ended: list[str] = []
        self.table = SequenceTable(
            limits,
            lambda: self.now,
            lambda moment: setattr(self, "wakes_at", moment),
            self.ended.append,
        )
        self.table.slots_per_worker = slots
        self.workers: list[Worker] = []
        for _ in range(workers):
            self.hire()

    def hire(self) -> Worker:
        worker = Worker(self)
        self.workers.append(worker)
        self.table.add(worker)
        return worker

    @property
    def worker(self) -> Worker:
        return self.workers[0]

    def put(self, sequence_id: str, name: str = "", **marks: bool) -> Job:
        job = Job(name, **marks)
        self.table.put(sequence_id, job)
        return job

    def served(self, sequence_id: str, **marks: bool) -> Job:
        """A request that is answered."""
        job = self.put(sequence_id, **marks)
        for worker in self.workers:
            if job in worker.queue:
                worker.run(job)
                worker.answer(job)
        return job

    def wait(self, seconds: float) -> None:
        """Time passes, and the table is called when it wants to be."""
        until = self.now + seconds
        while self.wakes_at <= until:
            self.now, self.wakes_at = max(self.now, self.wakes_at), math.inf
            self.table.expire()
        self.now = until

    def leave(self, job: Job) -> None:
        """The client of a job leaves."""
        job.has_left = True
        if job.dispatched is None:
            self.table.discard(job)


def test_the_jobs_of_a_sequence_follow_each_other_and_those_of_others_go_beside():
    play = Play()
    a, b, other = play.put("s"), play.put("s"), play.put("t")
    assert play.worker.queue == [a, other]
    play.worker.run()
    assert play.worker.queue == []
    play.worker.answer(a)
    assert play.worker.queue == [b]
    assert [a.is_first, b.is_first, other.is_first] == [True, False, True]


def test_sequences_go_where_the_fewest_are_and_stay_there():
    play = Play(workers=3)
    jobs = [play.served(sequence_id) for sequence_id in "abcd"]
    assert [len(worker.open) for worker in play.workers] == [2, 1, 1]
    again = play.put("b")
    assert again in play.workers[1].queue
    assert len(jobs) == play.table.open == 4


def test_a_sequence_waits_for_a_slot_and_gets_the_first_that_is_free():
    play = Play(slots=1)
    play.served("a")
    waiting = play.put("b")
    assert (play.table.open, play.table.waiting, play.table.queued) == (1, 1, 1)
    play.served("a", ends=True)
    assert play.worker.queue == [waiting]
    assert play.worker.told == ["a begins", "a end"]


def test_a_slot_more_is_taken_at_once():
    play = Play(slots=1)
    play.put("a")
    waiting = play.put("b")
    play.table.resize(2)
    assert waiting in play.worker.queue


def test_who_gets_no_slot_in_time_is_answered_so():
    play = Play(slots=1)
    play.put("a")
    play.worker.run()
    job = play.put("b")
    play.wait(31)
    assert isinstance(job.error, NoWorker)
    assert play.ended == ["no_slot"]
    assert (play.table.open, play.table.waiting) == (1, 0)


def test_there_is_room_for_so_many_sequences_and_so_many_jobs_of_each():
    play = Play(slots=1)
    for sequence_id in "abcd":
        play.put(sequence_id)
    with pytest.raises(SequencesFull):
        play.put("e")
    for _ in range(3):  # beside the one whose turn it is
        play.put("a")
    with pytest.raises(SequencesFull):
        play.put("a")


def test_a_refused_opener_leaves_nothing_behind():
    play = Play()
    play.worker.refuses = True
    job = play.put("a")
    assert isinstance(job.error, Overloaded)
    assert (play.table.open, play.ended, play.worker.told) == (0, [], [])


@pytest.mark.parametrize("place", [0, 1, 2])
def test_whoever_leaves_before_its_turn_leaves_the_others_in_order(place):
    play = Play()
    jobs = [play.put("a", str(number)) for number in range(3)]
    play.leave(jobs.pop(place))
    for job in jobs:
        assert play.worker.queue == [job]
        play.worker.run()
        play.worker.answer()
    assert jobs[0].is_first
    assert play.table.open == 1


def test_a_sequence_whose_only_job_left_before_its_turn_has_never_been():
    play = Play(slots=1)
    for sequence_id in ("a", "b"):  # one has a slot, the other waits
        play.leave(play.put(sequence_id))
    assert (play.table.open, play.table.waiting, play.ended, play.worker.told) == (0, 0, [], [])


def test_what_runs_holds_up_what_follows_though_its_client_has_left():
    play = Play()
    job, following = play.put("a"), play.put("a")
    play.worker.run()
    play.leave(job)
    assert play.worker.queue == []
    play.worker.answer()
    assert play.worker.queue == [following]


def test_idle_sequences_end_and_those_with_jobs_do_not():
    play = Play()
    play.served("idle")
    play.put("busy")
    play.worker.run()
    play.wait(9)
    play.served("kept")
    play.wait(2)
    assert play.worker.told[-1] == "idle idle"
    assert play.table.open == 2


def test_an_idle_sequence_whose_client_had_left_is_answered_apart():
    play = Play()
    job = play.put("a")
    play.worker.run()
    play.leave(job)
    play.worker.answer()
    play.wait(11)
    assert play.worker.told == ["a begins", "a client_gone"]


def test_nobody_can_go_on_with_an_id_that_nobody_was_told():
    play = Play()
    job = play.put(f"{MADE_HERE}1", starts=True)
    play.worker.run()
    play.leave(job)
    play.worker.answer()
    assert play.worker.told[-1] == f"{MADE_HERE}1 client_gone"
    assert play.table.open == 0


def test_a_sequence_that_is_too_old_ends_behind_what_runs_and_fails_what_waits():
    play = Play()
    for _ in range(12):
        play.served("a")
        play.wait(8)
    running, waiting = play.put("a"), play.put("a")
    play.worker.run()
    play.wait(5)
    assert waiting.answers == []
    play.worker.answer()
    assert running.answers == ["done"]
    assert isinstance(waiting.error, SequenceOver)
    assert play.worker.told[-1] == "a timeout"
    assert play.served("a").is_first


def test_a_marked_end_ends_behind_its_job_and_the_next_begins_anew():
    play = Play()
    play.put("a", ends=True)
    following = play.put("a")
    play.worker.run()
    play.worker.answer()
    play.worker.run()
    assert following.is_first
    assert play.worker.told == ["a begins", "a end", "a begins"]


def test_a_marked_start_begins_anew_behind_what_came_before():
    play = Play()
    before, start = play.put("a"), play.put("a", starts=True)
    play.worker.run()
    play.worker.answer()
    assert before.answers == ["done"]
    play.worker.run()
    assert start.is_first
    assert play.worker.told == ["a begins", "a end", "a begins"]
    assert play.table.open == 1


def test_with_continuous_batching_the_next_joins_and_the_end_waits_for_both():
    play = Play()
    story, stop, anew = play.put("a"), play.put("a", ends=True), play.put("a")
    play.worker.run()
    play.table.started(story)
    assert play.worker.queue == [stop]
    play.worker.run()
    play.worker.answer(stop)
    assert play.worker.told == ["a begins"]
    play.worker.answer(story)
    assert play.worker.told == ["a begins", "a end"]
    assert play.worker.queue == [anew]


def test_a_handler_ends_its_own_sequences_and_no_others():
    play = Play(workers=2)
    play.served("mine")
    play.served("others")
    own = play.worker if play.worker.open else play.workers[1]
    (sequence,) = own.open
    theirs = ({"mine", "others"} - {sequence.id}).pop()
    assert not play.table.end(theirs, Reason.END, own)
    assert play.table.end(sequence.id, Reason.END, own)
    assert not play.table.end("unknown", Reason.END, own)
    assert own.told[-1] == f"{sequence.id} end"
    assert play.table.open == 1


def test_who_comes_back_after_its_call_was_broken_off_is_answered():
    play = Play()
    play.served("a")
    play.table.leave("a")
    play.table.leave("unknown")
    assert play.worker.told == ["a begins", "a client_gone"]
    with pytest.raises(SequenceOver, match="broken off"):
        play.put("a")
    assert play.served("a", starts=True).is_first


def test_an_id_of_the_servers_that_is_over_is_not_opened_by_surprise():
    play = Play()
    play.served(f"{MADE_HERE}1", starts=True)
    play.wait(11)
    with pytest.raises(SequenceOver):
        play.put(f"{MADE_HERE}1")
    assert play.served(f"{MADE_HERE}1", starts=True).is_first


def test_when_a_worker_dies_all_of_its_sequences_are_told():
    play = Play(workers=2)
    for sequence_id in "abcd":
        play.served(sequence_id)
    ids = sorted(sequence.id for sequence in play.worker.open)
    running = play.put(ids[0])
    play.worker.run()
    waiting = play.put(ids[0])
    play.worker.die()
    assert running.answers == ["lost"]
    assert "It died." in str(waiting.error)
    assert play.ended == ["worker_died"] * 2
    for sequence_id in ids:
        with pytest.raises(SequenceOver, match="It died"):
            play.put(sequence_id)
        assert play.served(sequence_id, starts=True).is_first
        play.served(sequence_id)
    assert play.table.open == 4


def test_who_waits_behind_a_lost_job_with_a_start_begins_anew_elsewhere():
    play = Play()
    play.put("a")
    play.worker.run()
    lost, start, following = play.put("a"), play.put("a", starts=True), play.put("a")
    play.worker.die()
    assert isinstance(lost.error, SequenceOver)
    other = play.hire()
    assert other.queue == [start]
    assert following.answers == []


def test_a_sequence_that_the_dead_worker_had_not_seen_goes_elsewhere():
    play = Play()
    job = play.put("a")
    play.worker.die()
    assert play.hire().queue == [job]
    assert play.ended == []


def test_clients_who_never_say_start_can_go_on_after_a_while():
    play = Play()
    play.served("a")
    play.worker.die()
    play.hire()
    with pytest.raises(SequenceOver):
        play.put("a")
    play.wait(11)
    assert play.served("a").answers == ["done"]


def test_a_sequence_whose_first_request_failed_begins_with_the_next():
    play = Play()
    first, second, third = (play.put("a") for _ in range(3))
    play.worker.run()
    play.worker.fail()
    play.worker.run()
    play.worker.answer()
    assert (first.is_first, second.is_first, third.is_first) == (True, True, False)
    play.worker.run()
    play.worker.fail()
    assert not play.served("a", ends=True).is_first
    assert play.worker.told == ["a begins", "a fails", "a begins", "a end"]


def test_of_a_sequence_that_only_failed_the_handler_hears_the_end():
    play = Play()
    play.put("a")
    play.worker.run()
    play.worker.fail()
    waiting = play.put("a")
    play.leave(waiting)
    play.wait(11)
    assert play.worker.told == ["a begins", "a fails", "a client_gone"]


def test_a_worker_that_is_stopped_answers_what_was_accepted_and_tells_its_handler():
    play = Play()
    play.served("idle")
    first, second = play.put("busy"), play.put("busy")
    play.worker.run()
    play.table.close(play.worker)
    assert play.worker.told[-1] == "idle worker_stopped"
    with pytest.raises(SequenceOver, match="being stopped"):
        play.put("busy")
    play.worker.answer()
    assert not play.worker.is_closed
    play.worker.run()
    play.worker.answer()
    assert first.answers == second.answers == ["done"]
    assert play.worker.told[-1] == "busy worker_stopped"
    assert play.worker.is_closed
    other = play.hire()
    for sequence_id in ("idle", "busy"):
        with pytest.raises(SequenceOver):
            play.put(sequence_id)
    start = play.put("busy", starts=True)
    assert other.queue == [start]


def test_when_no_worker_is_left_all_that_wait_are_answered():
    play = Play(workers=0)
    jobs = [play.put("a"), play.put("a"), play.put("b")]
    play.table.fail_queued(NoWorker("none"))
    assert all(isinstance(job.error, NoWorker) for job in jobs)
    assert (play.table.open, play.table.waiting, play.table.queued) == (0, 0, 0)


class Anything(RuleBasedStateMachine):
    """Whatever comes in whatever order: each job is answered once, in order, one at a time."""

    ids = st.sampled_from(["a", "b", "c", "d", "e", f"{MADE_HERE}1", f"{MADE_HERE}2"])
    marks = st.sampled_from([False, False, False, True])

    @initialize(continuous=st.booleans())
    def begin(self, continuous: bool) -> None:
        self.continuous = continuous
        self.play = Play(workers=2, slots=2)
        self.accepted: list[Job] = []
        self.order: dict[str, list[Job]] = {}
        self.ran: dict[str, list[Job]] = {}

    @rule(requests=st.lists(st.tuples(ids, marks, marks), min_size=1, max_size=6))
    def request(self, requests: list[tuple[str, bool, bool]]) -> None:
        for sequence_id, starts, ends in requests:
            job = Job(f"{sequence_id}{len(self.accepted)}", starts=starts, ends=ends)
            try:
                self.play.table.put(sequence_id, job)
            except (SequencesFull, SequenceOver):
                continue
            self.accepted.append(job)
            self.order.setdefault(sequence_id, []).append(job)

    @rule(data=st.data())
    def run(self, data: st.DataObject) -> None:
        for worker in self.play.workers:
            if worker.queue and data.draw(st.booleans()):
                batch = list(worker.queue)
                assert len({job.sequence for job in batch}) == len(batch)
                for job in batch:
                    self.ran.setdefault(job.sequence.id, []).append(job)
                worker.run()

    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        for worker in self.play.workers:
            for job in list(worker.in_hand):
                if data.draw(st.booleans()):
                    worker.answer(job)
                elif data.draw(st.integers(0, 3)) == 0 and job is job.sequence.current:
                    worker.fail(job)
                elif self.continuous and data.draw(st.booleans()):
                    self.play.table.started(job)

    @precondition(lambda self: self.accepted)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(self.accepted))
        if not job.answers and not job.has_left:
            self.play.leave(job)

    @rule(sequence_id=ids)
    def end(self, sequence_id: str) -> None:
        self.play.table.end(sequence_id, Reason.END)

    @rule(sequence_id=ids)
    def break_off(self, sequence_id: str) -> None:
        self.play.table.leave(sequence_id)

    @rule(seconds=st.sampled_from([1.0, 9.0, 11.0, 31.0, 101.0]))
    def wait(self, seconds: float) -> None:
        self.play.wait(seconds)

    @rule(place=st.integers(0, 3))
    def die(self, place: int) -> None:
        alive = [worker for worker in self.play.workers if not worker.is_dead]
        if alive:
            alive[place % len(alive)].die()
            self.play.hire()

    @rule(place=st.integers(0, 3))
    def stop(self, place: int) -> None:
        going = [worker for worker in self.play.workers if worker.is_accepting]
        if going:
            self.play.table.close(going[place % len(going)])
            self.play.hire()

    @rule(refuses=st.booleans())
    def load(self, refuses: bool) -> None:
        for worker in self.play.workers:
            worker.refuses = refuses

    @invariant()
    def all_are_somewhere_or_answered_once(self) -> None:
        play = self.play
        inside = {job for worker in play.workers for job in (*worker.queue, *worker.in_hand)}
        waiting = [job for each in play.table._by_id.values() for job in each.queue]
        assert len(waiting) == len(set(waiting)) == play.table.queued
        inside |= set(waiting)
        for job in self.accepted:
            assert len(job.answers) <= 1
            assert job.answers or job.has_left or job in inside, job

    @invariant()
    def one_job_of_a_sequence_runs_and_they_run_in_order(self) -> None:
        for worker in self.play.workers:
            now = Counter(job.sequence for job in (*worker.queue, *worker.in_hand))
            assert self.continuous or max(now.values(), default=0) <= 1
        for sequence_id, ran in self.ran.items():
            places = [self.order[sequence_id].index(job) for job in ran]
            assert places == sorted(places)

    @invariant()
    def no_slot_leaks(self) -> None:
        play = self.play
        open_ = [sequence for worker in play.workers for sequence in worker.open]
        assert len(open_) == len(set(open_)) == play.table.open
        assert all(play.table._by_id[sequence.id] is sequence for sequence in open_)
        assert all(len(worker.open) <= 2 for worker in play.workers)
        assert all(not worker.open for worker in play.workers if worker.is_dead or worker.is_closed)
        free = any(worker.is_accepting and len(worker.open) < 2 for worker in play.workers)
        assert not (free and play.table.waiting)

    @invariant()
    def a_handler_hears_of_each_begin_and_end_in_turn(self) -> None:
        for worker in self.play.workers:
            begun: set[str] = set()
            failed: set[str] = set()
            for line in worker.told:
                sequence_id, _, what = line.partition(" ")
                if what == "begins":
                    assert sequence_id not in begun - failed, worker.told
                    begun.add(sequence_id)
                    failed.discard(sequence_id)
                elif what == "fails":
                    failed.add(sequence_id)
                else:
                    begun.remove(sequence_id)

    def teardown(self) -> None:
        if not hasattr(self, "play"):
            return
        play = self.play
        for worker in play.workers:
            worker.refuses = False
        for _ in range(len(self.accepted) + 1):
            for worker in play.workers:
                worker.run()
                worker.answer()
        play.wait(1000.0)
        assert all(job.answers or job.has_left for job in self.accepted)
        assert (play.table.open, play.table.waiting, play.table.queued) == (0, 0, 0)
        assert not any(worker.open for worker in play.workers)


def test_whatever_comes_in_whatever_order():
    run_state_machine_as_test(
        Anything, settings=settings(max_examples=100, stateful_step_count=50, deadline=None)
    )
