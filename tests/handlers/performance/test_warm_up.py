"""What happens between the initialisation of a handler and its first batch."""

import json
import logging
import shutil
from typing import Any

import pytest
import torch
from nets import MODEL, NUMBERS, NUMBERS_HANDLER, ask, ask_numbers, close, net

from marserve.backend.errors import OptionRefused
from marserve.backend.protocol import Input, Part, Predict
from marserve.handlers.inputs.images import sample_image

ALL = "precision: bf16, channels_last: true, fold_batch_norm: true"
OVERFLOWING = MODEL.replace("return super().forward(x)", "return super().forward(x * 1e6) / 1e6")


# -- accuracy --------------------------------------------------------------------------------------


def test_accuracy_is_checked_logged_and_described(load, caplog):
    caplog.set_level(logging.INFO)
    service = load(
        f"optimization: {{{ALL}, check_accuracy: {{max_relative_error: 0.05, min_agreement: 1}}}}"
    )
    assert "Against fp32: relative error 0.0" in caplog.text
    reply = service.predict(Predict([Input("1", {"describe": "True"}, [])]))
    described = json.loads(reply.predictions[0].body)["optimization"]
    assert (described["precision"], described["channels_last"]) == ("bf16", True)
    assert 0 < described["accuracy"]["relative_error"] < 0.05
    assert described["accuracy"]["agreement"] == 1.0


def test_a_model_that_overflows_does_not_load(load):
    sentence = "against fp32, the relative error is inf where 0.1 is allowed"
    with pytest.raises(OptionRefused, match=sentence):
        load("optimization: {precision: fp16, check_accuracy: 0.1}", OVERFLOWING)
    load("optimization: {precision: bf16, check_accuracy: 0.1}", OVERFLOWING)


def test_the_named_samples_are_used(load, tmp_path):
    for name in ("a.jpg", "b.jpg"):
        (tmp_path / name).write_bytes(sample_image())
    options = "precision: bf16, check_accuracy: {min_agreement: 0, samples: [%s]}"
    service = load(f"optimization: {{{options % 'a.jpg, b.jpg'}}}")
    assert len(net().seen) == 4  # each by both models
    ask(service)
    assert len(net().seen) == 5  # no comparison after that
    with pytest.raises(OptionRefused, match=r"check_accuracy: the sample input 'c.jpg' cannot be"):
        load(f"optimization: {{{options % 'c.jpg'}}}")


def test_without_a_sample_accuracy_cannot_be_checked(load):
    with pytest.raises(OptionRefused, match="check_accuracy: there is no sample input"):
        load("optimization: {check_accuracy: 0.1}", NUMBERS, "base_handler")


# -- torch.compile ---------------------------------------------------------------------------------


def compiled_frames(compiler: Any) -> int:
    return int(compiler["stats"]["unique_graphs"])


@pytest.mark.parametrize(("sizes", "graphs"), [((2, 4), 2), ((), 2)])
def test_every_size_is_compiled_before_the_worker_is_ready(load, compiler, sizes, graphs):
    config = "pt2: {compile: {backend: aot_eager}}"
    service = load(config, NUMBERS, NUMBERS_HANDLER, sizes=sizes)
    assert compiled_frames(compiler) == graphs
    answers = [ask_numbers(service, count) for count in (1, 2, 3, 4)]
    assert all(item == pytest.approx(answers[0][0]) for batch in answers for item in batch)
    assert compiled_frames(compiler) == graphs


def test_a_batch_with_a_refused_request_is_compiled_too(load, compiler):
    service = load("pt2: {compile: {backend: aot_eager}}", sizes=(4,))
    parts = [bytearray(sample_image()) for _ in range(3)] + [bytearray(b"no image")]
    reply = service.predict(
        Predict([Input(str(i), {}, [Part("body", "", b)]) for i, b in enumerate(parts)])
    )
    assert [item.status for item in reply.predictions] == [200, 200, 200, 400]
    assert compiled_frames(compiler) == 1
    assert len(json.loads(reply.predictions[0].body)) == 5


def test_new_shapes_are_not_compiled_in_traffic(load, compiler):
    model = NUMBERS.replace("nn.Linear(4, 3)", "nn.ReLU()")
    service = load("pt2: {compile: {backend: aot_eager}}", model, NUMBERS_HANDLER, sizes=(1,))
    part = Part("body", "application/json", b"[1.0, -2.0]")
    reply = service.predict(Predict([Input("1", {}, [part])]))
    assert json.loads(reply.predictions[0].body) == [1.0, 0.0]
    assert compiled_frames(compiler) == 1


def compiled_of(service: Any) -> dict[str, Any]:
    return service.context.describe_compiled()


def test_the_compiled_sizes_are_described(load, compiler):
    service = load("pt2: {compile: {backend: aot_eager}}", NUMBERS, NUMBERS_HANDLER, sizes=(2, 4))
    told = compiled_of(service)
    assert [(each["size"], each["graphs"]) for each in told["sizes"]] == [(2, 1), (4, 1)]
    assert all(each["seconds"] > 0 for each in told.pop("sizes"))
    assert told == {
        "by": "torch.compile",
        "backend": "aot_eager",
        "mode": "default",
        "dynamic": False,
        "graphBreaks": {},
        "otherSizes": "filled up to these",
        "fallback": None,
        "unforeseen": {},
    }


def test_graph_breaks_are_described_with_their_reason(load, compiler):
    model = f"import torch\n{NUMBERS}\n    def forward(self, x):\n        x = super().forward(x)\n"
    model += "        torch._dynamo.graph_break()\n        return x + 1\n"
    told = compiled_of(load("pt2: {compile: {backend: eager}}", model, NUMBERS_HANDLER, sizes=(2,)))
    assert told["sizes"][0]["graphs"] == 2
    [(reason, count)] = told["graphBreaks"].items()
    assert "graph_break" in reason
    assert count == 1


def test_shapes_that_run_uncompiled_in_traffic_are_counted(load, compiler, caplog):
    model = NUMBERS.replace("nn.Linear(4, 3)", "nn.ReLU()")
    service = load("pt2: {compile: {backend: aot_eager}}", model, NUMBERS_HANDLER, sizes=(1,))
    for body in (b"[1.0, -2.0]", b"[1.0, -2.0]", b"[1.0, 2.0, 3.0, 4.0]"):
        part = Part("body", "application/json", body)
        assert service.predict(Predict([Input("1", {}, [part])])).code == 200
    assert compiled_of(service)["unforeseen"] == {"[1, 2]": 2}
    assert caplog.text.count("A batch of shape [1, 2] runs uncompiled") == 1
    reply = service.predict(Predict([Input("1", {"describe": "True"}, [])]))
    described = json.loads(reply.predictions[0].body)["optimization"]["compiled"]
    assert described == compiled_of(service)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a compiler")
def test_compiled_in_lower_precision(load, compiler):
    options = "optimization: {precision: bf16, check_accuracy: 0.05}"
    service = load(
        f"{options}\npt2: {{compile: {{enable: true}}}}", NUMBERS, NUMBERS_HANDLER, sizes=(2,)
    )
    graphs = compiled_frames(compiler)
    plain = load("", NUMBERS, NUMBERS_HANDLER)
    assert close(ask_numbers(service, 2), ask_numbers(plain, 2), 0.05)
    assert compiled_frames(compiler) == graphs


def test_the_model_is_served_uncompiled_if_the_compiler_fails(load, compiler, caplog, monkeypatch):
    def broken(_graph, _inputs):
        raise RuntimeError("no compiler")

    torch._dynamo.register_backend(broken, name="ofi")
    service = load("pt2: {compile: {backend: ofi}}", NUMBERS, NUMBERS_HANDLER)
    assert "Compiling failed; the model is served uncompiled." in caplog.text
    assert len(ask_numbers(service, 3)) == 3
    told = compiled_of(service)
    assert told["fallback"].startswith("served uncompiled: the sample input failed")
    assert told["sizes"] == []
    assert service.context.load_warnings == [f"pt2: {told['fallback']}"]


def test_without_a_sample_the_model_is_compiled_with_the_first_requests(load, compiler, caplog):
    service = load("pt2: {compile: {backend: aot_eager}}", NUMBERS, "base_handler", sizes=(2,))
    assert "Nothing can be compiled before the first requests come" in caplog.text
    assert compiled_frames(compiler) == 0
    assert compiled_of(service)["fallback"].startswith("compiled as requests come: there is no sa")
    assert not service.context.load_warnings
    ask_numbers(service, 2)
    assert compiled_frames(compiler) == 1
