"""What is sent."""

import io
import json
import os

import pytest

from marserve.tools.bench.errors import BenchError
from marserve.tools.bench.payloads import Payload, generate_payload, read_payloads


@pytest.fixture
def folder(tmp_path):
    for name in ("b.jpg", "a.json", "c", ".hidden"):
        (tmp_path / name).write_text(name)
    (tmp_path / "below").mkdir()
    return tmp_path


def test_a_file(folder):
    assert read_payloads(str(folder / "b.jpg")) == [Payload(b"b.jpg", "image/jpeg")]


def test_the_files_of_a_directory_by_name(folder):
    assert read_payloads(str(folder)) == [
        Payload(b"a.json", "application/json"),
        Payload(b"b.jpg", "image/jpeg"),
        Payload(b"c", "application/octet-stream"),
    ]


def test_a_pattern(folder):
    assert [read_payload.body for read_payload in read_payloads(str(folder / "?.j*"))] == [
        b"a.json",
        b"b.jpg",
    ]


def test_a_file_whose_name_looks_like_a_pattern(folder):
    (folder / "[1].txt").write_text("x")
    assert read_payloads(str(folder / "[1].txt")) == [Payload(b"x", "text/plain")]


@pytest.mark.parametrize("name", ["missing.jpg", "*.png", "below", "missing/*.jpg"])
def test_nothing_to_send_is_told(folder, name):
    with pytest.raises(BenchError, match="There is nothing to send"):
        read_payloads(str(folder / name))


def test_a_file_that_cannot_be_read_is_told(folder, monkeypatch):
    def refuse(path, _flags):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "open", refuse)  # root, who runs tests, may read everything
    with pytest.raises(BenchError, match=r"Cannot read .*b\.jpg: Permission denied"):
        read_payloads(str(folder / "b.jpg"))


@pytest.mark.parametrize(
    ("kind", "length"), [("bytes", 1024), ("bytes:5", 5), ("bytes:70000", 70000)]
)
def test_bytes(kind, length):
    payload = generate_payload(kind)
    assert len(payload.body) == length
    assert payload == generate_payload(kind)


def test_text_and_json():
    assert len(generate_payload("text:20").body.split()) == 20
    assert len(json.loads(generate_payload("json:3").body)["data"]) == 3
    (tensor,) = json.loads(generate_payload("tensor:3").body)["inputs"]
    assert tensor["shape"] == [1, len(tensor["data"])] == [1, 3]


def test_an_image():
    pillow = pytest.importorskip("PIL.Image")
    payload = generate_payload("image:64x48")
    image = pillow.open(io.BytesIO(payload.body))
    assert (image.format, image.size) == ("JPEG", (64, 48))
    assert payload.content_type == "image/jpeg"


@pytest.mark.parametrize(
    "kind",
    [
        "",
        "video",
        "bytes:0",
        "bytes:-1",
        "bytes:x",
        "bytes:1x1",
        "image:64",
        "image:0x5",
        "json:1:2",
    ],
)
def test_kinds_that_do_not_exist_are_told(kind):
    with pytest.raises(BenchError, match="generate"):
        generate_payload(kind)
