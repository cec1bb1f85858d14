import os
import subprocess
import sys
import threading

import pytest
import torch

from marserve.handlers.base_handler import BaseHandler
from marserve.handlers.performance.micro_batching import MicroBatching
from marserve.handlers.refusals import UnusableInput

TIMEOUT_SECONDS = 120  # seconds until a test that hangs fails


class Doubler(BaseHandler):
    """Doubles numbers, refuses text, fails on None in the stage `fail_in`."""

    def __init__(self) -> None:
        super().__init__()
        self.device = torch.device("cpu")
        self.sizes: list[int] = []
        self.seen: set[tuple[str, int]] = set()
        self.fail_in = "preprocess"

    def preprocess(self, data):
        self.note("preprocess", data)
        return self.each_usable(self.number_of, data)

    def number_of(self, row):
        if isinstance(row["body"], str):
            raise UnusableInput("not a number")
        return row["body"]

    def inference(self, data):
        self.sizes.append(len(data))
        self.note("inference", data)
        return [item * 2 for item in data]

    def postprocess(self, data):
        self.note("postprocess", data)
        return data

    def note(self, stage, data) -> None:
        self.seen.add((stage, self.handle.get_micro_batch_idx()))
        if stage == self.fail_in and any(item in (None, {"body": None}) for item in data):
            raise SystemExit(3)
        if stage == self.fail_in and any(item in (-1, -2, {"body": -1}) for item in data):
            raise ValueError(f"{stage} failed")


@pytest.fixture
def make(make_context, begin_batch):
    """Return a handler with micro-batches, and a function that sends it numbers."""
    started = []

    def run(micro_batch_size=2, handler=None, **parallelism):
        handler = handler or Doubler()
        handler.handle = MicroBatching(handler, micro_batch_size=micro_batch_size)
        handler.handle.parallelism = parallelism
        started.append(handler.handle)

        def ask(*bodies, headers=None):
            context = begin_batch(make_context(), *(headers or [{}] * len(bodies)))
            return handler.handle([{"body": item} for item in bodies], context), context

        return handler, ask

    yield run
    for item in started:
        item.shutdown()


@pytest.mark.parametrize("parallelism", [{}, {"preprocess": 3, "inference": 2, "postprocess": 3}])
@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_results_are_in_the_order_of_the_requests(make, size, parallelism):
    _, ask = make(size, **parallelism)
    for count in (1, 7, 20):
        assert ask(*range(count))[0] == [2 * item for item in range(count)]


def test_batches_are_split(make):
    handler, ask = make(3)
    ask(*range(7))
    assert sorted(handler.sizes) == [1, 3, 3]
    stages = ("preprocess", "inference", "postprocess")
    assert handler.seen == {(stage, index) for stage in stages for index in range(3)}


def test_stages_work_at_the_same_time(make):
    class Meeting(Doubler):
        """The first piece stays in inference until the second has been prepared."""

        def __init__(self):
            super().__init__()
            self.second_prepared = threading.Event()

        def preprocess(self, data):
            if self.handle.get_micro_batch_idx() == 1:
                self.second_prepared.set()
            return super().preprocess(data)

        def inference(self, data):
            assert self.second_prepared.wait(TIMEOUT_SECONDS)
            return super().inference(data)

    _, ask = make(1, Meeting())
    assert ask(1, 2)[0] == [2, 4]


def test_a_stage_has_as_many_threads_as_asked_for(make):
    class Meeting3(Doubler):
        def __init__(self):
            super().__init__()
            self.all_here = threading.Barrier(3, timeout=TIMEOUT_SECONDS)

        def inference(self, data):
            self.all_here.wait()
            return super().inference(data)

    handler, ask = make(1, Meeting3(), inference=3)
    assert handler.handle.parallelism == {"preprocess": 1, "inference": 3, "postprocess": 1}
    assert ask(1, 2, 3)[0] == [2, 4, 6]


def test_threads_are_also_an_argument_and_those_that_are_not_set_stay():
    micro_batching = MicroBatching(Doubler(), 2, {"inference": 2})
    micro_batching.parallelism = {"preprocess": 3}

    assert micro_batching.parallelism == {"preprocess": 3, "inference": 2, "postprocess": 1}


@pytest.mark.parametrize(
    "parallelism", [{"describe": 1}, {"inference": -1}, {"inference": 0}, {"inference": "2"}]
)
def test_invalid_parallelism(parallelism):
    with pytest.raises(AssertionError):
        MicroBatching(Doubler()).parallelism = parallelism


def test_a_micro_batch_is_not_empty():
    with pytest.raises(AssertionError, match="at least 1"):
        MicroBatching(Doubler(), micro_batch_size=0)


@pytest.mark.parametrize("stage", ["preprocess", "inference", "postprocess"])
def test_a_failing_stage_fails_its_batch_and_no_other(make, stage):
    handler, ask = make(2)
    handler.fail_in = stage
    for _ in range(2):
        with pytest.raises(ValueError, match=f"{stage} failed"):
            ask(1, 2, -1, 4, 5)
    assert ask(1, 2, 3)[0] == [2, 4, 6]


def test_sys_exit_in_a_stage_is_raised_by_the_handler(make):
    _, ask = make(1)
    with pytest.raises(SystemExit):
        ask(1, None)
    assert ask(1)[0] == [2]


def test_refused_requests_of_several_micro_batches(make):
    handler, ask = make(2)
    answers, context = ask(0, "a", 2, 3, "b", 5, "c")
    assert [answers[i] for i in (0, 2, 3, 5)] == [0, 4, 6, 10]
    assert [context.get_response_status(i)[0] for i in (1, 4, 6)] == [400] * 3
    assert sorted(handler.sizes) == [2, 2]


def test_there_is_no_micro_batch_outside_a_stage(make):
    handler, ask = make()
    ask(1)
    with pytest.raises(RuntimeError, match="only in a stage"):
        handler.handle.get_micro_batch_idx()


def test_descriptions_and_explanations_are_those_of_the_handler(make):
    class Explaining(BaseHandler):
        def describe_handle(self):
            return {"doubles": True}

        def preprocess(self, data):
            return len(data)

        def get_insights(self, tensor_data, inputs, target=0):
            return ["because"] * tensor_data

    _, ask = make(1, Explaining())
    assert ask(1, headers=[{"describe": "True"}])[0] == [{"doubles": True}]
    answers, context = ask(1, 2, 3, headers=[{"explain": "True"}] * 3)
    assert answers == ["because"] * 3
    assert [row[1] for row in context.metrics.drain()] == ["HandlerTime"]


def test_the_profiler_sees_the_stages(make, monkeypatch, caplog):
    monkeypatch.setenv("ENABLE_TORCH_PROFILER", "1")
    caplog.set_level("INFO")
    handler, ask = make(1)
    handler.profiler_args = {
        "activities": [torch.profiler.ProfilerActivity.CPU],
        "on_trace_ready": None,
    }
    answers, context = ask(1, 2, "a")
    assert answers[:2] == [2, 4]
    assert context.get_response_status(2)[0] == 400
    assert all(stage in caplog.text for stage in ("preprocess", "inference", "postprocess"))
    with pytest.raises(ValueError, match="preprocess failed"):
        ask(1, -1)


def test_shutting_down_ends_the_threads_and_a_batch_starts_new_ones(make):
    handler, ask = make(1, preprocess=2)
    before = threading.active_count()
    ask(1)
    assert threading.active_count() > before
    handler.handle.shutdown()
    assert threading.active_count() == before
    assert ask(1, 2)[0] == [2, 4]


def test_a_worker_ends_without_shutting_down():
    code = """
from types import SimpleNamespace
from marserve.handlers.base_handler import BaseHandler
from marserve.handlers.performance.micro_batching import MicroBatching

class Echo(BaseHandler):
    def preprocess(self, data): return data
    inference = postprocess = preprocess

handler = Echo()
handler.handle = MicroBatching(handler)
context = SimpleNamespace(
    metrics=None, get_request_header=lambda *_: None, model_yaml_config={}
)
assert handler.handle([1, 2], context) == [1, 2]
"""
    done = subprocess.run(
        [sys.executable, "-c", code], timeout=TIMEOUT_SECONDS, env={**os.environ}, check=False
    )
    assert done.returncode == 0
