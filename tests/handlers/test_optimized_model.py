"""Whole handlers with the options, loaded as a worker loads them."""

import json
import logging
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from marserve.backend.errors import OptionRefused
from marserve.backend.loader import load_service
from marserve.backend.protocol import Input, Load, Part
from marserve.backend.service import Service
from marserve.handlers.images import sample_image

MODEL = """
import torch
from torch import nn

class Net(nn.Sequential):
    seen = []

    def __init__(self):
        super().__init__(
            nn.Conv2d(3, 8, 3, stride=4), nn.BatchNorm2d(8), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5),
        )
        self[2].register_forward_pre_hook(self.note)

    def note(self, _layer, given):
        [x] = given
        is_last = x.is_contiguous(memory_format=torch.channels_last)
        Net.seen.append((len(x), {one.dtype for one in self.parameters()}, is_last))

    def forward(self, x):
        return super().forward(x)
"""
OVERFLOWING = MODEL.replace("return super().forward(x)", "return super().forward(x * 1e6) / 1e6")
NUMBERS = """
from torch import nn

class Linear(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 3))
"""
NUMBERS_HANDLER = """
from ts.torch_handler.base_handler import BaseHandler

class Numbers(BaseHandler):
    def sample_input(self):
        return [0.1, 0.2, 0.3, 0.4]
"""
FP32, BF16 = torch.float32, torch.bfloat16
ALL = "precision: bf16, channels_last: true, fold_batch_norm: true"


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Service]]:
    """Load a model whose model-config.yaml is this."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)

    def loaded(
        config: str,
        model: str = MODEL,
        handler: str = "image_classifier",
        sizes: tuple[int, ...] = (),
        batch_size: int = 4,
        **manifest: str,
    ) -> Service:
        (tmp_path / "optimized_net.py").write_text(model)
        (tmp_path / "config.yaml").write_text(config)
        if "\n" in handler:
            (tmp_path / "own_handler.py").write_text(handler)
            handler = "own_handler"
        described = {
            "modelName": "net",
            "handler": handler,
            "modelFile": "optimized_net.py",
            "configFile": "config.yaml",
            **manifest,
        }
        (tmp_path / "MAR-INF").mkdir(exist_ok=True)
        (tmp_path / "MAR-INF" / "MANIFEST.json").write_text(json.dumps({"model": described}))
        torch.manual_seed(0)
        plan = ("net", str(tmp_path), handler, batch_size, None, True, True, 10**6, "1")
        return load_service(Load(*plan, compiled_sizes=list(sizes)))

    yield loaded
    for name in set(sys.modules) - before:
        if name in ("optimized_net", "own_handler"):
            del sys.modules[name]


@pytest.fixture
def compiler() -> Iterator[Any]:
    """torch's counters, from zero; the compiler is afterwards as it was."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield torch._dynamo.utils.counters
    torch._dynamo.reset()
    torch.compiler.set_stance("default")


def ask(service: Service, count: int = 1, body: bytes | None = None) -> list[Any]:
    body = sample_image() if body is None else body
    inputs = [Input(str(i), {}, [Part("body", "", bytearray(body))]) for i in range(count)]
    reply = service.predict(inputs)
    assert reply.code == 200, reply.message
    return [json.loads(one.body) for one in reply.predictions]


def ask_numbers(service: Service, count: int) -> list[Any]:
    part = Part("body", "application/json", b"[1.0, 2.0, 3.0, 4.0]")
    reply = service.predict([Input(str(i), {}, [part]) for i in range(count)])
    assert reply.code == 200, reply.message
    return [json.loads(one.body) for one in reply.predictions]


def net() -> Any:
    return sys.modules["optimized_net"].Net


def close(given: list[Any], expected: list[Any], tolerance: float) -> bool:
    return all(
        one == pytest.approx(other, abs=tolerance)
        for one, other in zip(given, expected, strict=True)
    )


@pytest.mark.parametrize(
    ("options", "dtypes", "is_last"),
    [
        ("", {FP32}, False),
        ("precision: fp32", {FP32}, False),
        ("precision: bf16", {BF16}, False),
        ("precision: fp16", {torch.float16}, False),
        ("precision: bf16, cast: matmul", {BF16, FP32}, False),
        ("channels_last: true", {FP32}, True),
        ("fold_batch_norm: true", {FP32}, False),
        (ALL, {BF16}, True),
        ("precision: bf16, cast: matmul, channels_last: true", {BF16, FP32}, True),
    ],
)
def test_an_option_changes_the_way_and_not_the_answer(load, options, dtypes, is_last) -> None:
    expected = ask(load(""), 2)
    del sys.modules["optimized_net"]
    given = ask(load(f"optimization: {{{options}}}"), 2)
    assert net().seen[-1] == (2, dtypes, is_last)
    assert close(given, expected, 0.0 if not options else 2e-3)


def test_stages_give_what_the_plain_model_gives(load) -> None:
    expected = ask(load(""), 4)
    given = ask(load("optimization: {device_stages: [cpu, cpu], check_accuracy: 1.0e-5}"), 4)
    assert close(given, expected, 1e-5)


def test_stages_in_lower_precision(load) -> None:
    expected = ask(load(""), 4)
    for cast in ("all", "matmul"):
        options = f"precision: bf16, cast: {cast}, device_stages: [cpu, cpu]"
        assert close(ask(load(f"optimization: {{{options}}}"), 4), expected, 2e-3)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ("optimization: {precision: bf17}", "precision is one of fp32, bf16, fp16, not 'bf17'"),
        ("optimization: {cuda_graphs: true}", "cuda_graphs needs a CUDA device; this worker is on"),
        ("optimization: {device_stages: [cpu, 'cuda:7']}", "device_stages: no cuda:7 here"),
        (
            "optimization: {device_stages: [cpu, cpu]}\npt2: {compile: {backend: eager}}",
            "cuda_graphs and device_stages exclude pt2.compile",
        ),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_what_cannot_be_done_is_told(load, config, sentence) -> None:
    with pytest.raises(OptionRefused, match=sentence):
        load(config)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("fold_batch_norm: true", "no batch norm of this model follows a convolution"),
        ("channels_last: true", "this model has no convolution over images"),
    ],
)
def test_an_option_without_effect_is_told(load, options, sentence) -> None:
    with pytest.raises(OptionRefused, match=sentence):
        load(f"optimization: {{{options}}}", NUMBERS, NUMBERS_HANDLER)


def test_what_is_no_eager_model_is_told(load, tmp_path) -> None:
    program = torch.export.export(nn.Linear(4, 3), (torch.ones(1, 4),))
    torch.export.save(program, tmp_path / "net.pt2")
    with pytest.raises(OptionRefused, match=r"optimization needs an eager model \(--model-file\)"):
        load("optimization: {precision: bf16}", modelFile="", serializedFile="net.pt2")


# -- accuracy --------------------------------------------------------------------------------------


def test_accuracy_is_checked_logged_and_described(load, caplog) -> None:
    caplog.set_level(logging.INFO)
    service = load(
        f"optimization: {{{ALL}, check_accuracy: {{max_relative_error: 0.05, min_agreement: 1}}}}"
    )
    assert "Against fp32: relative error 0.0" in caplog.text
    reply = service.predict([Input("1", {"describe": "True"}, [])])
    said = json.loads(reply.predictions[0].body)["optimization"]
    assert (said["precision"], said["channels_last"]) == ("bf16", True)
    assert 0 < said["accuracy"]["relative_error"] < 0.05
    assert said["accuracy"]["agreement"] == 1.0


def test_a_model_that_overflows_does_not_load(load) -> None:
    sentence = "against fp32, the relative error is inf where 0.1 is allowed"
    with pytest.raises(OptionRefused, match=sentence):
        load("optimization: {precision: fp16, check_accuracy: 0.1}", OVERFLOWING)
    load("optimization: {precision: bf16, check_accuracy: 0.1}", OVERFLOWING)


def test_the_samples_are_those_that_are_named(load, tmp_path) -> None:
    for name in ("a.jpg", "b.jpg"):
        (tmp_path / name).write_bytes(sample_image())
    options = "precision: bf16, check_accuracy: {min_agreement: 0, samples: [%s]}"
    service = load(f"optimization: {{{options % 'a.jpg, b.jpg'}}}")
    assert len(net().seen) == 4  # each by both models
    ask(service)
    assert len(net().seen) == 5  # no comparison after that
    with pytest.raises(OptionRefused, match=r"check_accuracy: the sample input 'c.jpg' cannot be"):
        load(f"optimization: {{{options % 'c.jpg'}}}")


def test_without_a_sample_accuracy_cannot_be_checked(load) -> None:
    with pytest.raises(OptionRefused, match="check_accuracy: there is no sample input"):
        load("optimization: {check_accuracy: 0.1}", NUMBERS, "base_handler")


# -- torch.compile ---------------------------------------------------------------------------------


def numbers(answer: Any) -> torch.Tensor:
    """All numbers in a JSON answer, in order."""
    if isinstance(answer, dict):
        answer = list(answer.values())
    if isinstance(answer, list):
        return torch.cat([numbers(one) for one in answer])
    return torch.tensor([float(answer)])


def compiled_frames(compiler: Any) -> int:
    return int(compiler["stats"]["unique_graphs"])


@pytest.mark.parametrize(("sizes", "graphs"), [((2, 4), 2), ((), 2)])
def test_every_size_is_compiled_before_the_worker_is_ready(load, compiler, sizes, graphs) -> None:
    config = "pt2: {compile: {backend: aot_eager}}"
    service = load(config, NUMBERS, NUMBERS_HANDLER, sizes=sizes)
    assert compiled_frames(compiler) == graphs
    answers = [ask_numbers(service, count) for count in (1, 2, 3, 4)]
    assert all(one == pytest.approx(answers[0][0]) for batch in answers for one in batch)
    assert compiled_frames(compiler) == graphs


def test_a_batch_in_which_one_is_refused_is_compiled_too(load, compiler) -> None:
    service = load("pt2: {compile: {backend: aot_eager}}", sizes=(4,))
    parts = [bytearray(sample_image()) for _ in range(3)] + [bytearray(b"no image")]
    reply = service.predict([Input(str(i), {}, [Part("body", "", b)]) for i, b in enumerate(parts)])
    assert [one.status for one in reply.predictions] == [200, 200, 200, 400]
    assert compiled_frames(compiler) == 1
    assert len(json.loads(reply.predictions[0].body)) == 5


def test_a_shape_that_nobody_foresaw_is_not_compiled_in_traffic(load, compiler) -> None:
    model = NUMBERS.replace("nn.Linear(4, 3)", "nn.ReLU()")
    service = load("pt2: {compile: {backend: aot_eager}}", model, NUMBERS_HANDLER, sizes=(1,))
    part = Part("body", "application/json", b"[1.0, -2.0]")
    reply = service.predict([Input("1", {}, [part])])
    assert json.loads(reply.predictions[0].body) == [1.0, 0.0]
    assert compiled_frames(compiler) == 1


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a compiler")
def test_compiled_in_lower_precision(load, compiler) -> None:
    options = "optimization: {precision: bf16, check_accuracy: 0.05}"
    service = load(
        f"{options}\npt2: {{compile: {{enable: true}}}}", NUMBERS, NUMBERS_HANDLER, sizes=(2,)
    )
    graphs = compiled_frames(compiler)
    plain = load("", NUMBERS, NUMBERS_HANDLER)
    assert close(ask_numbers(service, 2), ask_numbers(plain, 2), 0.05)
    assert compiled_frames(compiler) == graphs


def test_a_compiler_that_fails_is_done_without(load, compiler, caplog, monkeypatch) -> None:
    def broken(_graph: Any, _inputs: Any) -> Any:
        raise RuntimeError("no compiler")

    torch._dynamo.register_backend(broken, name="ofi")
    service = load("pt2: {compile: {backend: ofi}}", NUMBERS, NUMBERS_HANDLER)
    assert "Compiling failed; the model is served uncompiled." in caplog.text
    assert len(ask_numbers(service, 3)) == 3


def test_without_a_sample_it_is_compiled_when_requests_come(load, compiler, caplog) -> None:
    service = load("pt2: {compile: {backend: aot_eager}}", NUMBERS, "base_handler", sizes=(2,))
    assert "Nothing can be compiled before the first requests come" in caplog.text
    assert compiled_frames(compiler) == 0
    ask_numbers(service, 2)
    assert compiled_frames(compiler) == 1


# -- other handlers --------------------------------------------------------------------------------

MICRO_BATCHES = """
from ts.handler_utils.micro_batching import MicroBatching
from ts.torch_handler.image_classifier import ImageClassifier

class Micro(ImageClassifier):
    def initialize(self, context):
        super().initialize(context)
        self.handle = MicroBatching(self, micro_batch_size=2)
"""
SEGMENTER = MODEL.replace(
    "nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5),", "nn.Conv2d(8, 2, 56),"
).replace("return super().forward(x)", "return {'out': super().forward(x)}")
DETECTOR = """
import torch
from torch import nn

class Net(nn.Module):
    seen = []

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, stride=4), nn.BatchNorm2d(8), nn.ReLU())

    def forward(self, images):
        dtypes = {one.dtype for one in self.parameters()}
        Net.seen.append((len(images), dtypes, images[0].stride(-1) == 3))
        return [self.found(one) for one in self.body(images)]

    def found(self, one):
        scores = one.sigmoid().amax((1, 2))
        boxes = one[:, :2, :2].flatten(1)
        return {"boxes": boxes, "labels": torch.arange(8), "scores": scores}
"""


@pytest.mark.parametrize(
    ("handler", "model"),
    [
        (MICRO_BATCHES, MODEL),
        ("image_segmenter", SEGMENTER),
        ("object_detector", DETECTOR),
    ],
    ids=["micro-batches", "segmenter", "detector"],
)
def test_other_handlers_have_the_options_too(load, handler, model) -> None:
    expected = ask(load("", model, handler), 3)
    service = load(f"optimization: {{{ALL}, check_accuracy: 0.1}}", model, handler)
    assert net().seen[-1][1:] == ({BF16}, True)
    for one, other in zip(ask(service, 3), expected, strict=True):
        torch.testing.assert_close(numbers(one), numbers(other), rtol=0, atol=0.02)
