"""Files that nobody wrote in good faith, or that nobody may read: a sentence, and soon."""

import io
import json
import os
import sys
import time
import zipfile

import pytest

from marserve.tools.doctor import contents
from marserve.tools.doctor.main import main
from marserve.tools.doctor.sources import Kind, find_sources

MANIFEST = json.dumps({"model": {"modelName": "m", "modelVersion": "1", "handler": "handler.py"}})


def test_code_that_is_nested_too_deeply_is_a_finding(tmp_path, capsys):
    (tmp_path / "handler.py").write_text(f"import ts\nx={'-' * 50_000}1\n")
    (tmp_path / "other.py").write_text("import ts\n\0")
    assert main([str(tmp_path)]) == 1
    assert capsys.readouterr().out.count("[handler-syntax]") == 2


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("values.yaml", 'image: pytorch/torchserve\nx: "' + "{{" * 100_000 + '"\n'),
        ("values.yaml", "image: pytorch/torchserve\n{{ if x }}" + "\n" * 300_000),
        ("handler.py", "\n" * 300_000 + "import ts\n"),
        ("config.properties", "\n" * 300_000 + "model_store=x\n"),
    ],
)
def test_long_files_are_read_in_a_moment(tmp_path, capsys, name, text):
    (tmp_path / name).write_text(text)
    began = time.monotonic()
    assert main([str(tmp_path)]) == 0
    assert time.monotonic() - began < 10
    assert "1 source read" in capsys.readouterr().out


def test_an_archive_of_too_much_code_is_told(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(contents, "_MAX_TEXT", 3 << 20)
    with zipfile.ZipFile(tmp_path / "m.mar", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("MAR-INF/MANIFEST.json", MANIFEST)
        for number in range(3):
            archive.writestr(f"{number}.py", "#" * (2 << 20))
        archive.writestr("handler.py", "def handle(data, context):\n    return data\n")
    assert main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "not read to its end: it has more than 3 MiB of code" in out
    assert "[not-read]" in out


def test_an_archive_that_takes_too_long_is_told(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(contents, "_MAX_SECONDS", -1.0)
    with zipfile.ZipFile(tmp_path / "m.mar", "w") as archive:
        archive.writestr("MAR-INF/MANIFEST.json", MANIFEST)
    assert main([str(tmp_path)]) == 0
    assert "it takes more than" in capsys.readouterr().out


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_what_may_not_be_read_is_told(tmp_path, capsys):
    (tmp_path / "start.sh").write_text("torchserve --start\n")
    (tmp_path / "config.properties").write_text("model_store=x\n")
    (tmp_path / "config.properties").chmod(0)
    (tmp_path / "closed").mkdir(mode=0)
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("permission denied. [not-read]") == 2


def test_links_in_a_circle_and_pipes_hold_nobody_up(tmp_path):
    (tmp_path / "again").symlink_to(tmp_path)
    (tmp_path / "config.properties").symlink_to("config.properties")
    for name in ("start.sh", "m.mar", "handler.py"):
        os.mkfifo(tmp_path / name)
    (tmp_path / "Dockerfile").write_text("FROM x\n")
    assert [source.kind for source in find_sources(tmp_path)] == [Kind.DOCKERFILE]


def test_any_file_name_can_be_printed(tmp_path, monkeypatch):
    (tmp_path / "h\udce9.py").write_text("from ts.nope import x\n")
    printed = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", printed)
    assert main([str(tmp_path)]) == 1
    printed.seek(0)
    assert "h\\udce9.py:1: ts.nope is not served" in printed.read()


def test_a_path_that_cannot_be_is_not_there(capsys):
    assert main(["a" * 5000]) == 2
    assert main(["--url", ""]) == 2
    assert capsys.readouterr().err.startswith("marserve doctor: There is no aaa")


@pytest.mark.parametrize("seconds", ["nan", "inf", "0", "x"])
def test_a_time_that_is_none_is_refused(seconds, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path), "--load", "--load-timeout", seconds])
    assert ended.value.code == 2
    assert "--load-timeout" in capsys.readouterr().err
