import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from marserve.handlers.base_handler import BaseHandler
from marserve.handlers.performance.micro_batching import MicroBatching
from marserve.handlers.refusals import RefusedInputs, UnusableInput


class Adder(BaseHandler):
    """Adds the number of requests that each stage reads from the context."""

    def preprocess(self, data):
        return torch.tensor(self.each_usable(self._number_of, data))

    def _number_of(self, row):
        if row["body"] == "late":
            return -1.0
        if not isinstance(row["body"], float):
            raise UnusableInput("not a number")
        return row["body"]

    def inference(self, data):
        return data + len(self.context.request_ids)

    def postprocess(self, data):
        if -1.0 in (data - len(self.context.request_ids)):
            raise RefusedInputs({0: "too late"})
        return [f"{self.context.get_request_id(i)}:{x}" for i, x in enumerate(data.tolist())]


@pytest.fixture
def enter(make_context, begin_batch):
    """Begin a batch of these bodies while others run."""
    handler, shared = Adder(), make_context()
    handler.begin_overlapping()

    def begin(*bodies, **headers):
        context = begin_batch(shared.for_batch(), *[headers] * len(bodies))
        steps = handler.enter_stages([{"body": item} for item in bodies], context)
        return handler, steps, context

    return begin


def test_batches_overlap_and_each_stage_sees_its_own(enter):
    handler, first, context = enter(1.0, 2.0)
    _, second, _ = enter(3.0)
    with ThreadPoolExecutor(1) as preprocess, ThreadPoolExecutor(1) as postprocess:
        for steps in (first, second):
            preprocess.submit(next, steps).result()
        for steps in (second, first):
            next(steps)
        for steps in (second, first):
            postprocess.submit(next, steps).result()
    assert handler.leave_stages(first) == ["id-0:3.0", "id-1:4.0"]
    assert handler.leave_stages(second) == ["id-0:4.0"]
    times = [row[5] for row in context.metrics.drain() if row[1] == "HandlerTime"]
    assert times == [["id-0", "id-1"], ["id-0"]]


def test_a_request_is_refused_alone_in_stages(enter):
    handler, steps, context = enter(1.0, "?", 2.0)
    seconds = [next(steps) for _ in range(3)]
    assert seconds == sorted(seconds)
    answers = handler.leave_stages(steps)
    assert [answers[0], answers[2]] == ["id-0:3.0", "id-2:4.0"]
    assert answers[1]["message"] == "not a number"
    statuses = [context.get_response_status(i)[0] for i in range(3)]
    assert statuses == [200, 400, 200]


def test_a_batch_of_refused_requests_skips_the_model(enter):
    handler, steps, context = enter("?", None)
    handler.model = None
    for _ in range(3):
        next(steps)
    assert [item["code"] for item in handler.leave_stages(steps)] == [400, 400]
    [row] = context.metrics.drain()
    assert (row[1], row[5]) == ("HandlerTime", ["id-0", "id-1"])


def test_a_refusal_after_the_model_fails_the_batch_when_stages_overlap(enter):
    _, steps, _ = enter("late", 1.0)
    next(steps)
    next(steps)
    with pytest.raises(RefusedInputs, match="too late"):
        next(steps)


def test_a_refusal_after_the_model_runs_the_others_again_without_overlap(make_context, begin_batch):
    rows = [{"body": "late"}, {"body": 1.0}]
    answers = Adder().handle(rows, begin_batch(make_context(), {}, {}))
    assert [answers[0]["message"], answers[1]] == ["too late", "id-1:2.0"]


@pytest.mark.parametrize("header", ["describe", "explain"])
def test_descriptions_and_explanations_run_alone(enter, header):
    assert enter(1.0, **{header: "True"})[1] is None


def test_profiled_batches_run_alone(enter, monkeypatch):
    monkeypatch.setenv("ENABLE_TORCH_PROFILER", "1")
    assert enter(1.0)[1] is None


class OwnHandle(BaseHandler):
    def handle(self, data, context):
        return data


class OwnContext(BaseHandler):
    context = None


def test_a_handler_that_cannot_overlap_gives_the_reason():
    micro = BaseHandler()
    micro.handle = MicroBatching(micro)
    assert "OwnHandle overrides handle()" in OwnHandle().overlap_obstacle()
    assert "overrides handle()" in micro.overlap_obstacle()
    assert "context as an attribute" in OwnContext().overlap_obstacle()
    assert Adder().overlap_obstacle() == ""


def test_until_stages_overlap_a_context_is_seen_by_every_thread():
    handler = BaseHandler()
    thread = threading.Thread(target=lambda: setattr(handler, "context", "theirs"))
    thread.start()
    thread.join()
    assert handler.context == "theirs"


def test_a_thread_that_the_handler_started_sees_the_context_set_last():
    handler = BaseHandler()
    handler.begin_overlapping()
    handler.context = "last"
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: handler.context).result() == "last"


def test_a_handler_that_does_not_call_its_base_has_no_context():
    class Bare(BaseHandler):
        def __init__(self):
            pass

    with pytest.raises(AttributeError, match="'Bare' object has no attribute 'context'"):
        _ = Bare().context
