"""Stages of successive batches overlap in a worker, and several batches are outstanding."""

import os
import signal
import time
from collections import Counter

import pytest

pytestmark = pytest.mark.integration

STAGES = ("preprocess", "inference", "postprocess")


class Flags:
    """Holds up stages of `handlers/staged.py`, and tells which were entered."""

    def __init__(self, directory, wait_for) -> None:
        self.directory = directory
        self._wait_for = wait_for
        (directory / "record").touch()

    def order(self, id_, **orders):
        return {"id": id_, "flags": str(self.directory), **orders}

    def hold(self, stage, id_) -> None:
        (self.directory / f"{stage}-{id_}").touch()

    def let_go(self, stage, id_) -> None:
        (self.directory / f"{stage}-{id_}").unlink()

    @property
    def entered(self) -> list[str]:
        lines = (self.directory / "record").read_text().splitlines()
        return [line.rpartition(" ")[0] for line in lines]

    def wait_entered(self, stage, id_) -> None:
        self._wait_for(lambda: f"{stage} {id_}" in self.entered, what=lambda: self.entered)


@pytest.fixture(scope="module")
def server(share_server):
    """One whose workers have torch already: many of them are started here."""
    with share_server(preload_modules="marserve.handlers.base_handler") as server:
        yield server


@pytest.fixture
def flags(tmp_path, wait_for):
    flags = Flags(tmp_path, wait_for)
    yield flags
    for each in tmp_path.glob("*-*"):
        each.unlink()


class Model:
    """An installed handler."""

    def __init__(self, server, name) -> None:
        self.server = server
        self.name = name

    def ask(self, flags, id_, **orders):
        return self.server.predict(self.name, json=flags.order(id_, **orders))


@pytest.fixture
def staged(server, handlers, install):
    """Install the handler."""

    def make(config="overlapStages: true\n", **query):
        return Model(server, install(config, handlers / "staged.py", **query))

    return make


def in_stages(*ids):
    """The last stage with the first, and so on."""
    return list(zip(STAGES[::-1], ids, strict=True))


def fill(model, flags, background, *ids):
    """Have a batch in each stage, and keep it there."""
    answers = []
    for stage, id_ in in_stages(*ids):
        flags.hold(stage, id_)
        answers.append(background(model.ask, flags, id_))
        flags.wait_entered(stage, id_)
    return answers


def test_three_batches_are_in_three_stages(staged, flags, background):
    answers = fill(staged(), flags, background, *"abc")
    assert not any(answer.done() for answer in answers)
    for stage, id_ in in_stages(*"abc"):
        flags.let_go(stage, id_)
    assert [answer.result().text for answer in answers] == ["a of 1", "b of 1", "c of 1"]


def test_waiting_between_stages_is_not_time_of_the_answer(
    server, staged, flags, background, wait_for
):
    model = staged()
    flags.hold("inference", "a")
    first = background(model.ask, flags, "a")
    flags.wait_entered("inference", "a")
    began = time.monotonic()
    second = background(model.ask, flags, "b")
    flags.wait_entered("preprocess", "b")
    wait_for(lambda: time.monotonic() > began + 0.3)
    flags.let_go("inference", "a")
    assert (first.result().text, second.result().text) == ("a of 1", "b of 1")
    query = {"id": second.result().headers["x-request-id"]}
    (line,) = server.management("GET", "/requests", params=query).json()["requests"]
    assert line["shares"]["answeringMs"] < line["shares"]["handOverMs"] > 200
    assert "for its next stage, in which other batches were." in line["explanation"]


def test_requests_wait_where_they_can_be_joined_until_the_worker_has_room(
    server, staged, flags, background
):
    """One batch is in each stage, one in the wire, and the others in the queue."""
    model = staged(batch_size=8, max_batch_delay=0)
    answers = fill(model, flags, background, *"abc")
    answers += [background(model.ask, flags, id_) for id_ in "defg"]
    server.wait_queued(model.name, 3)
    for stage, id_ in in_stages(*"abc"):
        flags.let_go(stage, id_)
    sizes = [answer.result().text[-1] for answer in answers]
    assert sizes[:3] == ["1", "1", "1"]
    assert sorted(sizes[3:]) == ["1", "3", "3", "3"]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("", 1),
        ("overlapStages: true\n", 4),
        ("overlapStages: true\noutstandingBatches: 7\n", 7),
        ("continuousBatching: true\n", 1),
    ],
)
def test_describe_shows_how_many_batches_a_worker_holds(server, staged, config, expected):
    name = staged(config).name
    assert server.describe(name)["outstandingBatches"] == expected
    server.management("PUT", f"/models/{name}?min_worker=0&synchronous=true")
    chosen = 7 if "outstandingBatches" in config else None
    assert server.describe(name).get("outstandingBatches") == chosen


@pytest.mark.parametrize(
    "config", ["overlapStages: false\n", "", "overlapStages: auto\n", "outstandingBatches: 3\n"]
)
def test_stages_do_not_overlap_unless_they_are_told_to(config, staged, flags, background):
    model = staged(config)
    flags.hold("postprocess", "a")
    first = background(model.ask, flags, "a")
    flags.wait_entered("postprocess", "a")
    second = background(model.ask, flags, "b")
    flags.let_go("postprocess", "a")
    assert [first.result().text, second.result().text] == ["a of 1", "b of 1"]
    assert flags.entered == [f"{stage} {id_}" for id_ in "ab" for stage in STAGES]


def test_several_batches_are_outstanding_though_stages_do_not_overlap(
    server, staged, flags, background
):
    model = staged("outstandingBatches: 3\n")
    flags.hold("inference", "a")
    answers = [background(model.ask, flags, "a")]
    flags.wait_entered("inference", "a")
    answers += [background(model.ask, flags, id_) for id_ in "bcd"]
    server.wait_queued(model.name, 1)
    flags.let_go("inference", "a")
    assert [answer.result().text for answer in answers] == [f"{id_} of 1" for id_ in "abcd"]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("how", "status", "message"), [("raise", 503, "Prediction failed"), ("404", 404, "not here")]
)
def test_a_failure_in_a_stage_is_told_as_ever_and_hits_nobody_else(
    stage, how, status, message, staged, flags, together
):
    model = staged(batch_size=4, max_batch_delay=50)
    calls = [lambda id_=id_: model.ask(flags, id_) for id_ in "abcde"]
    calls.append(lambda: model.ask(flags, "bad", fail={stage: how}))
    *good, bad = together(calls)
    assert [answer.status_code for answer in good] == [200] * 5
    assert (bad.status_code, bad.json()["message"].partition(". ")[0]) == (status, message)


@pytest.mark.parametrize("stage", STAGES)
def test_a_request_that_ends_its_worker_in_a_stage_dies_of_the_second(
    server, stage, staged, flags, together
):
    model = staged()
    calls = [lambda id_=id_: model.ask(flags, id_) for id_ in "abcd"]
    calls.append(lambda: model.ask(flags, "bad", fail={stage: "exit"}))
    *good, bad = together(calls)
    assert [answer.status_code for answer in good] == [200] * 4
    assert bad.status_code == 500
    assert bad.json()["message"].startswith("Worker died. Its process ")
    assert Counter(flags.entered)[f"{stage} bad"] == 2
    server.wait_workers(model.name, "READY")


def test_whoever_is_outstanding_at_a_killed_worker_is_answered_by_the_next(
    server, staged, flags, background
):
    model = staged()
    answers = fill(model, flags, background, *"abc")
    answers.append(background(model.ask, flags, "d"))
    server.wait_taken(model.name, 4)
    pid = server.worker(model.name)["pid"]
    os.kill(pid, signal.SIGKILL)
    for stage, id_ in in_stages(*"abc"):
        flags.let_go(stage, id_)
    results = [answer.result() for answer in answers]
    assert [(result.status_code, result.text) for result in results] == [
        (200, f"{id_} of 1") for id_ in "abcd"
    ]
    assert server.worker(model.name)["pid"] != pid
    # Those that were begun with run alone, and nothing behind them before they are answered.
    assert {f"postprocess {id_}" for id_ in "abcd"} <= set(flags.entered)


def test_questions_wait_until_the_batches_before_them_are_done(server, staged, flags, background):
    model = staged()
    answers = fill(model, flags, background, *"abc")
    path = f"/explanations/{model.name}"
    why = background(server.inference, "POST", path, json=flags.order("why"))
    server.wait_taken(model.name, 4)
    assert "preprocess why" not in flags.entered
    for stage, id_ in in_stages(*"abc"):
        flags.let_go(stage, id_)
    assert [answer.result().status_code for answer in answers] == [200] * 3
    assert why.result().status_code == 200
    assert flags.entered[-2:] == ["preprocess why", "explain why"]


@pytest.mark.parametrize("method", ["PUT", "DELETE"])
def test_workers_that_are_not_wanted_any_more_answer_all_they_have(
    method, server, staged, flags, background
):
    model = staged()
    answers = fill(model, flags, background, *"abc")
    answers.append(background(model.ask, flags, "d"))
    server.wait_taken(model.name, 4)
    none = {"min_worker": 0, "max_worker": 0, "synchronous": "true"}
    end = background(server.management, method, f"/models/{model.name}/1.0", params=none)
    for stage, id_ in in_stages(*"abc"):
        flags.let_go(stage, id_)
    assert [answer.result().text for answer in answers] == [f"{id_} of 1" for id_ in "abcd"]
    assert end.result().status_code == 200


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("def handle(data, context):\n    return data\n", "the handler is a function"),
        (
            "from ts.torch_handler.base_handler import BaseHandler\n"
            "class Own(BaseHandler):\n"
            "    def initialize(self, context): pass\n"
            "    def handle(self, data, context): return data\n",
            "Own overrides handle()",
        ),
    ],
)
def test_a_handler_that_cannot_overlap_is_refused_if_it_has_to(
    server, make_archive, source, reason
):
    archive = make_archive(server.store, source, "rigid", "overlapStages: true\n")
    answer = server.register(archive, initial_workers=1, synchronous="true")
    assert answer.status_code == 500
    assert f"overlapStages cannot be true: {reason}" in answer.json()["message"]


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ("overlapStages: often", "overlapStages='often': it is true, false or auto"),
        ("outstandingBatches: 0", "outstandingBatches=0: it is a whole number from 1 to 10000"),
        ("outstandingBatches: many", "outstandingBatches=many: it is a whole number"),
        (
            "overlapStages: true\nasyncCommunication: true",
            "overlapStages: true has no meaning beside asyncCommunication",
        ),
        (
            "outstandingBatches: 2\ncontinuousBatching: true",
            "outstandingBatches: 2 has no meaning beside continuousBatching",
        ),
        (
            "overlapStages: true\nparallelType: tp\nparallelLevel: 2",
            "overlapStages: true has no meaning beside parallelType=tp",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(server, handlers, make_archive, config, reason):
    archive = make_archive(server.store, handlers / "staged.py", "senseless", f"{config}\n")
    answer = server.register(archive)
    assert answer.status_code == 400
    assert reason in answer.json()["message"]
