"""Which stream waits for which, on a stand-in for CUDA that writes down what is asked of it."""

from contextlib import contextmanager

import pytest
import torch

from marserve.handlers.base_handler import BaseHandler
from marserve.handlers.image_classifier import ImageClassifier
from marserve.handlers.performance.stage_streams import StageStreams, to_device

DEVICE = torch.device("cuda:1")


class Cuda:
    """Streams by name, and a log of what is done with them."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.current = "usual"
        self.made = 0

    def Stream(self, device):  # noqa: N802 - torch's name
        assert device == DEVICE
        self.made += 1
        return FakeStream(self, f"own {self.made}")

    def default_stream(self, device):
        assert device == DEVICE
        return FakeStream(self, "usual")

    def current_stream(self, device):
        assert device == DEVICE
        return FakeStream(self, self.current)

    @contextmanager
    def device(self, device):
        assert device == DEVICE
        yield

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream.name
        yield
        self.current = before


class FakeStream:
    def __init__(self, cuda, name) -> None:
        self.cuda, self.name = cuda, name

    def wait_event(self, event) -> None:
        self.cuda.log.append(f"{self.name} waits for {event}")

    def record_event(self) -> "FakeEvent":
        return FakeEvent(self.cuda, self.name)


class FakeEvent:
    def __init__(self, cuda, name) -> None:
        self.cuda, self.name = cuda, name

    def __str__(self) -> str:
        return f"what {self.name} did"

    def synchronize(self) -> None:
        self.cuda.log.append(f"{self} is over")


@pytest.fixture
def cuda(monkeypatch):
    stand_in = Cuda()
    for name in ("Stream", "default_stream", "current_stream", "device", "stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(stand_in, name))
    return stand_in


def test_each_stage_has_a_stream_that_waits_for_the_stage_before(cuda) -> None:
    label = StageStreams(DEVICE).label()
    for stage in ("preprocess", "inference", "postprocess"):
        with label(stage):
            cuda.log.append(f"{stage} on {cuda.current}")
    assert cuda.log == [
        "preprocess on own 1",
        "usual waits for what own 1 did",
        "inference on usual",
        "own 2 waits for what usual did",
        "postprocess on own 2",
        "what own 2 did is over",
    ]


def test_batches_wait_for_themselves_alone(cuda) -> None:
    streams = StageStreams(DEVICE)
    first, second = streams.label(), streams.label()
    with first("preprocess"):
        pass
    with second("preprocess"):
        pass
    assert cuda.log == []
    with second("inference"):
        pass
    assert len(cuda.log) == 1


class Logging(BaseHandler):
    def __init__(self, cuda) -> None:
        super().__init__()
        self.device = DEVICE
        self.cuda = cuda

    def preprocess(self, data):
        return self.cuda.current

    def inference(self, data):
        return f"{data}, {self.cuda.current}"

    def postprocess(self, data):
        return [f"{data}, {self.cuda.current}"]


def test_a_handler_on_a_gpu_uses_them_only_while_its_stages_overlap(
    cuda, make_context, begin_batch
) -> None:
    handler, context = Logging(cuda), begin_batch(make_context(), {})
    assert handler.handle([{}], context) == ["usual, usual, usual"]
    handler.begin_overlapping()
    passage = handler.enter_stages([{}], begin_batch(context.for_batch(), {}))
    for _ in range(3):
        passage.advance()
    assert handler.leave_stages(passage) == ["own 1, usual, own 2"]
    assert passage._kept == [[{}], "own 1", "own 1, usual"]  # a stream may still read them


class Pinned(torch.Tensor):
    """A tensor that writes down how it is copied."""

    def pin_memory(self):
        self.pinned = True
        return self

    def to(self, *args, **kwargs):
        return (getattr(self, "pinned", False), args, kwargs)


@pytest.mark.parametrize(
    ("device", "copied"),
    [
        (DEVICE, (True, (DEVICE,), {"non_blocking": True})),
        (torch.device("cpu"), (False, (torch.device("cpu"),), {})),
        (None, (False, (None,), {})),
    ],
)
def test_only_to_a_gpu_is_copied_from_pinned_memory(device, copied) -> None:
    assert to_device(torch.zeros(2).as_subclass(Pinned), device) == copied


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_stages_compute_the_same(make_context, begin_batch) -> None:
    handler, shared = ImageClassifier(), make_context(gpu=0)
    handler.device, handler.map_location = torch.device("cuda:0"), "cuda"
    handler.model = torch.nn.Flatten().to(handler.device)
    assert handler.overlaps_by_itself()
    rows = [{"body": [[[float(n)] * 4] * 4] * 3} for n in range(8)]
    expected = handler.handle(rows, begin_batch(shared, *[{}] * 8))
    handler.begin_overlapping()
    passages = [
        handler.enter_stages(rows, begin_batch(shared.for_batch(), *[{}] * 8)) for _ in range(20)
    ]
    for _ in range(3):
        for passage in passages:
            passage.advance()
    assert [handler.leave_stages(passage) for passage in passages] == [expected] * 20
