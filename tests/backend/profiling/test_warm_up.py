"""Samples: where they come from, and the batches of them that a handler wants run."""

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from marserve.backend.context import Context
from marserve.backend.metrics import MetricsStore
from marserve.backend.profiling.samples import NoSample, WarmUpFailed, find_samples, warm_up
from marserve.backend.protocol import Input, Load, Part
from marserve.backend.service import Service

Answer = Callable[[list[dict[str, Any]], Context], Any]


@pytest.fixture
def perform(tmp_path):
    """Warm up with a handler that answers like this, whose sample input is ``"pi"``."""

    def performed(*warm_ups, answer=lambda data, _: list(data), sample="pi", **load):
        context = Context("m", str(tmp_path), None, 8, None, "1", metrics=MetricsStore())
        context.warm_ups += warm_ups
        service = Service(answer, context, owner=SimpleNamespace(sample_input=lambda: sample))
        plan = Load("m", str(tmp_path), "h", 8, None, True, 1000, "1", **load)
        warm_up(plan, service)
        return context, service

    return performed


def test_batches_of_samples_are_run_as_if_clients_had_sent_them(perform, tmp_path):
    (tmp_path / "one.json").write_text("[1]")
    batches = []

    def answer(data, context):
        batches.append([row["body"] for row in data])
        context.metrics.add_counter("Seen", 1)
        assert context.request_ids is not None
        return ["" for _ in data]

    def warm_up_(run):
        run()
        run(3)
        run(2, "one.json")

    context, service = perform(warm_up_, answer=answer)
    assert batches == [["pi"], ["pi"] * 3, [[1]] * 2]
    assert (context.request_ids, context.request_processor, context.warm_ups) == (None, None, [])
    assert service.context.warm_ups == []
    assert context.metrics.drain() == []


def test_the_sample_of_the_yaml_goes_before_the_handlers(perform, tmp_path):
    (tmp_path / "sample.txt").write_text("tau")
    seen = []
    perform(
        lambda run: run(),
        answer=lambda data, _: seen.extend(data) or [1],
        samples=["sample.txt"],
    )
    assert seen == [{"body": "tau"}]


def test_warm_ups_come_in_order_and_what_one_raises_is_the_loads(perform):
    order = []

    def first(_run):
        order.append("first")

    def second(_run):
        order.append("second")
        raise LookupError("not good enough")

    with pytest.raises(LookupError, match="not good enough"):
        perform(first, second)
    assert order == ["first", "second"]


def refuse_first(data: list[Any], context: Context) -> list[str]:
    context.set_response_status(400, "", 0)
    return ["" for _ in data]


def fail(_data: list[Any], _context: Context) -> list[str]:
    raise ValueError("bug")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"answer": refuse_first}, "the sample input failed with status 400; see the model's log"),
        ({"answer": fail}, r"the sample input failed with status 503 \(Prediction failed\)"),
        ({"sample": None}, "there is no sample input"),
        ({"samples": ["absent.jpg"]}, "'absent.jpg' cannot be read"),
        ({"asynchronous": True}, "a handler that is a coroutine"),
    ],
)
def test_a_batch_that_cannot_be_run_is_reported(perform, changes, sentence):
    with pytest.raises(WarmUpFailed, match=sentence):
        perform(lambda run: run(), **changes)


def never() -> Any:
    raise AssertionError("the handler is not to be asked")


@pytest.mark.parametrize(
    ("name", "content_type"),
    [
        ("cat.jpg", "image/jpeg"),
        ("in/here/rows.json", "application/json"),
        ("words.txt", "text/plain"),
        ("unknown.xyzzy", ""),
        ("rows.json.gz", ""),
        ("../model/cat.png", "image/png"),
    ],
)
def test_a_file_of_the_archive_is_what_its_name_says(tmp_path, name, content_type):
    path = tmp_path / "model" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "model").mkdir(exist_ok=True)
    path.write_bytes(b"content")
    headers = {"Content-Type": content_type} if content_type else {}
    assert find_samples(str(tmp_path / "model"), [name], never) == [
        Input("sample", headers, [Part("body", content_type, b"content")])
    ]


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "link", "in/../../secret"])
def test_a_file_outside_the_archive_is_refused(tmp_path, name):
    model_dir = tmp_path / "model"
    model_dir.mkdir()
    (tmp_path / "secret").write_bytes(b"secret")
    (model_dir / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(NoSample, match="outside the model's directory"):
        find_samples(str(model_dir), [name], never)


@pytest.mark.parametrize("name", ["gone.json", "."])
def test_a_file_that_cannot_be_read_is_reported(tmp_path, name):
    with pytest.raises(NoSample, match=r"cannot be read: (No such file|Is a directory)"):
        find_samples(str(tmp_path), [name], never)


@pytest.mark.parametrize(
    ("sample", "content_type", "body"),
    [
        (b"\xff\xd8", "", b"\xff\xd8"),
        (bytearray(b"x"), "", b"x"),
        ("grün", "text/plain", "grün".encode()),
        ({"a": [1]}, "application/json", b'{"a": [1]}'),
        ([1, 2], "application/json", b"[1, 2]"),
    ],
)
def test_what_a_handler_gives_is_sent_as_a_client_would(tmp_path, sample, content_type, body):
    [found] = find_samples(str(tmp_path), [], lambda: sample)
    assert found.parts == [Part("body", content_type, body)]


@pytest.mark.parametrize(
    ("ask", "complaint"),
    [
        (lambda: None, "there is no sample input"),
        (lambda: 1 / 0, "sample_input failed: ZeroDivisionError"),
        (lambda: sys.exit(3), "sample_input failed: SystemExit"),
        (lambda: object(), "sample_input failed: TypeError"),
        (lambda needed: needed, "sample_input failed: TypeError"),
    ],
)
def test_without_a_sample_there_is_a_reason(tmp_path, ask, complaint):
    with pytest.raises(NoSample, match=complaint):
        find_samples(str(tmp_path), [], ask)
