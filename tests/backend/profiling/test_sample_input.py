import sys
from pathlib import Path
from typing import Any

import pytest

from marserve.backend.profiling.sample_input import NoSample, find_sample
from marserve.backend.protocol import Input, Part


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
def test_a_file_of_the_archive_is_what_its_name_says(
    tmp_path: Path, name: str, content_type: str
) -> None:
    path = tmp_path / "model" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "model").mkdir(exist_ok=True)
    path.write_bytes(b"content")
    headers = {"Content-Type": content_type} if content_type else {}
    assert find_sample(str(tmp_path / "model"), name, never) == Input(
        "sample", headers, [Part("body", content_type, b"content")]
    )


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "link", "in/../../secret"])
def test_a_file_outside_the_archive_is_refused(tmp_path: Path, name: str) -> None:
    model_dir = tmp_path / "model"
    model_dir.mkdir()
    (tmp_path / "secret").write_bytes(b"secret")
    (model_dir / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(NoSample, match="outside the model's directory"):
        find_sample(str(model_dir), name, never)


@pytest.mark.parametrize("name", ["gone.json", "."])
def test_a_file_that_cannot_be_read_is_reported(tmp_path: Path, name: str) -> None:
    with pytest.raises(NoSample, match=r"cannot be read: (No such file|Is a directory)"):
        find_sample(str(tmp_path), name, never)


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
def test_what_a_handler_gives_is_sent_as_a_client_would(
    tmp_path: Path, sample: Any, content_type: str, body: bytes
) -> None:
    found = find_sample(str(tmp_path), "", lambda: sample)
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
def test_without_a_sample_there_is_a_reason(tmp_path: Path, ask: Any, complaint: str) -> None:
    with pytest.raises(NoSample, match=complaint):
        find_sample(str(tmp_path), "", ask)
