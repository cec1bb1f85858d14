"""The referee sees what must not happen; else a green run would say nothing."""

import json
from random import Random

import pytest

from chaos.growth import Sample, leaks
from chaos.http_client import Answer
from chaos.rules import (
    CRASHING_REQUEST,
    FAILING_REQUEST,
    FRONTEND_DOWN,
    MATE_FAILED,
    NO_DESCRIPTORS,
    SCALED,
    WORKER_LOST,
    Outcome,
    Verdict,
    judge,
)
from chaos.served import ALL, Request, make_request
from chaos.timeline import Fault, Timeline

MODELS = {model.name: model for model in ALL}
DIED = json.dumps({"code": 500, "message": "Worker died. Its process was killed."})
FAILED = json.dumps({"code": 503, "message": "Prediction failed"})


def request(name: str = "batched", **order: object) -> Request:
    return make_request(MODELS[name], "token-1", Random(1), **order)


def verdict(
    asked: Request,
    status: int = 200,
    body: str | None = None,
    *,
    lost: str = "",
    faults: tuple[Fault, ...] = (),
    is_new: bool = False,
) -> Verdict:
    """On an outcome between the seconds 10 and 11."""
    text = asked.expected if body is None else body
    answer = None if lost else Answer(status, body=bytearray(text.encode()))
    timeline = Timeline()
    timeline.faults.extend(faults)
    return judge(asked, Outcome(10.0, 11.0, answer, lost, on_new_connection=is_new), timeline)


def fault(kind: str, model: str = "batched", at: float = 10.5) -> Fault:
    return Fault(kind, model, at, at)


@pytest.mark.parametrize("name", MODELS)
def test_its_own_payload_is_what_everybody_may_get_at_any_time(name):
    assert verdict(request(name)).is_allowed


@pytest.mark.parametrize("name", MODELS)
def test_the_payload_of_another_is_never_allowed(name):
    asked = request(name)
    other = make_request(MODELS[name], "token-2", Random(1)).expected
    for body in (other, asked.expected[:-5], asked.expected * 2, ""):
        everything = (fault(FRONTEND_DOWN, ""), fault(WORKER_LOST, ""))
        assert not verdict(asked, body=body, faults=everything).is_allowed


def test_who_asks_for_a_failure_must_not_get_another_answer():
    assert verdict(request(do="refuse"), 418, "").is_allowed
    assert not verdict(request(do="refuse"), 400, "").is_allowed
    assert not verdict(request(do="raise")).is_allowed
    assert not verdict(request(), 418, "x").is_allowed


def test_an_innocent_may_die_of_two_crashes_only():
    lost = fault(WORKER_LOST)
    assert not verdict(request(), 500, DIED).is_allowed
    assert not verdict(request(), 500, DIED, faults=(lost,)).is_allowed
    assert verdict(request(), 500, DIED, faults=(lost, lost)).is_allowed
    assert verdict(request(), 500, DIED, faults=(fault(CRASHING_REQUEST),)).is_allowed


def test_faults_of_other_models_and_other_times_are_no_excuse():
    for other in (fault(CRASHING_REQUEST, "single"), fault(CRASHING_REQUEST, at=8.0)):
        assert not verdict(request(), 500, DIED, faults=(other,)).is_allowed


def test_mates_of_failing_requests_are_counted():
    failing = (fault(FAILING_REQUEST),)
    assert verdict(request(), 503, FAILED, faults=failing) == Verdict(MATE_FAILED)
    assert not verdict(request(), 503, FAILED).is_allowed


def test_a_request_is_lost_with_the_frontend_only():
    down, short = fault(FRONTEND_DOWN, ""), fault(NO_DESCRIPTORS, "")
    assert not verdict(request(), lost="connection lost").is_allowed
    assert verdict(request(), lost="connection lost", faults=(down,)).is_allowed
    assert not verdict(request(), lost="connection lost", faults=(short,)).is_allowed
    assert verdict(request(), lost="connection lost", faults=(short,), is_new=True).is_allowed
    assert not verdict(request(), lost="late", faults=(short,)).is_allowed


def test_an_answer_breaks_off_only_if_it_comes_in_pieces_and_something_failed():
    for name, is_allowed in (("streaming", True), ("batched", False)):
        died = fault(WORKER_LOST, name)
        given = verdict(request(name), lost="broken off", faults=(died,))
        assert given.is_allowed is is_allowed
    assert not verdict(request("streaming"), lost="broken off").is_allowed


def test_a_whole_answer_of_pieces_breaks_off_with_its_worker():
    body = json.dumps({"code": 500, "message": "The answer was broken off: Worker died."})
    died = fault(WORKER_LOST, "stepping")
    assert verdict(request("stepping"), 500, body, faults=(died,)).is_allowed
    assert not verdict(request("stepping"), 500, body).is_allowed


def test_a_sequence_is_over_only_with_its_worker():
    asked, text = request("sequences", step=2), "Sequence is over, and its state is lost"
    assert asked.expected.endswith(" 2")
    assert not verdict(asked, 409, text).is_allowed
    for kind in (WORKER_LOST, SCALED):
        assert verdict(asked, 409, text, faults=(fault(kind, "sequences"),)).is_allowed
        assert not verdict(request(), 409, text, faults=(fault(kind),)).is_allowed


def test_models_and_workflows_may_fail_with_what_they_call():
    for name, behind in (("caller", "batched"), ("flow__echo", "flow__echo")):
        assert not verdict(request(name), 500, FAILED).is_allowed
        assert verdict(request(name), 500, "x", faults=(fault(WORKER_LOST, behind),)).is_allowed
        assert not verdict(
            request(name), 500, "x", faults=(fault(WORKER_LOST, "single"),)
        ).is_allowed


def test_a_request_to_an_engine_fails_with_the_engine_and_not_with_another_request():
    requests = (make_request(MODELS["engine"], "token", Random(seed)) for seed in range(99))
    asked = next(request for request in requests if request.streams)
    for kind in (FAILING_REQUEST, WORKER_LOST):
        faults = (fault(kind, "engine"),)
        is_allowed = verdict(asked, lost="broken off", faults=faults).is_allowed
        assert is_allowed is (kind == WORKER_LOST)
        assert not verdict(request("engine"), 503, FAILED, faults=faults).is_allowed
        assert not verdict(asked, lost="late", faults=faults).is_allowed


def test_an_object_may_have_more_members_and_no_others():
    asked = request("rerank")
    answer = {"id": "any", **json.loads(asked.expected)}
    assert verdict(asked, body=json.dumps(answer)).is_allowed
    answer["results"].reverse()
    assert len(answer["results"]) > 1
    assert not verdict(asked, body=json.dumps(answer)).is_allowed


def test_a_soak_fails_by_what_grows_and_not_by_what_varies():
    def samples(growth, noise):
        rng = Random(1)
        return [
            Sample(
                number,
                number,
                1000.0,
                0.001,
                0.01,
                frontend=int((60 + growth * number + noise * rng.random()) * 2**20),
                workers=400 << 20,
                descriptors=130 + rng.randint(0, 5),
                threads=8,
                tasks=20,
                children=18,
                series=600,
                logs=number << 20,
            )
            for number in range(20)
        ]

    assert leaks(samples(growth=0.1, noise=10)) == []
    assert leaks(samples(growth=5.0, noise=10)) != []
    assert leaks(samples(growth=0.0, noise=0)[:3]) == ["too few samples to tell"]
