"""Whole handlers with the options, loaded as a worker loads them."""

import logging
import sys

import pytest
import torch
from nets import MODEL, NUMBERS, NUMBERS_HANDLER, ask, close, net, numbers
from torch import nn

from marserve.backend.errors import OptionRefused

FP32, BF16 = torch.float32, torch.bfloat16
ALL = "precision: bf16, channels_last: true, fold_batch_norm: true"


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
def test_options_do_not_change_the_answers(load, options, dtypes, is_last):
    expected = ask(load(""), 2)
    del sys.modules["optimized_net"]
    values = ask(load(f"optimization: {{{options}}}"), 2)
    assert net().seen[-1] == (2, dtypes, is_last)
    assert close(values, expected, 0.0 if not options else 2e-3)


def test_device_stages_do_not_change_the_answers(load):
    expected = ask(load(""), 4)
    values = ask(load("optimization: {device_stages: [cpu, cpu], check_accuracy: 1.0e-5}"), 4)
    assert close(values, expected, 1e-5)


def test_the_log_recommends_overlapping_stages(load, caplog):
    caplog.set_level(logging.INFO)
    load("optimization: {precision: bf16}")
    assert "overlapStages" not in caplog.text
    load("optimization: {device_stages: [cpu, cpu]}")
    assert "with overlapStages: true in model-config.yaml the next one would" in caplog.text


def test_stages_in_lower_precision(load):
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
def test_impossible_options_are_refused(load, config, sentence):
    with pytest.raises(OptionRefused, match=sentence):
        load(config)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("fold_batch_norm: true", "no batch norm of this model follows a convolution"),
        ("channels_last: true", "this model has no convolution over images"),
    ],
)
def test_an_option_without_effect_is_refused(load, options, sentence):
    with pytest.raises(OptionRefused, match=sentence):
        load(f"optimization: {{{options}}}", NUMBERS, NUMBERS_HANDLER)


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # by torch 2.11 itself
def test_a_model_that_is_not_eager_is_refused(load, tmp_path):
    program = torch.export.export(nn.Linear(4, 3), (torch.ones(1, 4),))
    torch.export.save(program, tmp_path / "net.pt2")
    with pytest.raises(OptionRefused, match=r"optimization needs an eager model \(--model-file\)"):
        load("optimization: {precision: bf16}", modelFile="", serializedFile="net.pt2")


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
def test_other_handlers_have_the_options_too(load, handler, model):
    expected = ask(load("", model, handler), 3)
    service = load(f"optimization: {{{ALL}, check_accuracy: 0.1}}", model, handler)
    assert net().seen[-1][1:] == ({BF16}, True)
    for item, other in zip(ask(service, 3), expected, strict=True):
        torch.testing.assert_close(numbers(item), numbers(other), rtol=0, atol=0.02)


@pytest.mark.parametrize(
    "options", [ALL, "precision: bf16, cast: matmul", "device_stages: [cpu, cpu]"]
)
def test_answers_are_explained_as_before(load, options):
    pytest.importorskip("captum")

    def explained(config):
        return numbers(ask(load(config), headers={"explain": "True"}))

    expected = explained("")
    values = explained(f"optimization: {{{options}}}")
    assert (values - expected).abs().max() < 0.05 * expected.abs().max()
