"""Files that nobody wrote in good faith, or that nobody may read: a sentence, and soon."""

import io
import json
import os
import socket
import struct
import sys
import tarfile
import time
import tracemalloc
import zipfile

import pytest

from marserve.tools.doctor import contents, sources
from marserve.tools.doctor.main import main

#: A title for the window, colours in two forms, delete, a change of the direction of writing.
CONTROLS = "\x1b]0;x\x07\x1b[31m\x9b2J\x7f\u202e"
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
        ("Dockerfile", f"FROM x\nENV {'A' * 100_000}\n"),
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


def test_a_long_file_does_not_hide_the_others(tmp_path, capsys):
    (tmp_path / "a.properties").write_text("model_store=x\n")
    os.truncate(tmp_path / "a.properties", 100 << 20)
    (tmp_path / "b.properties").write_text("model_store=x\n")
    assert main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.count("[not-read]") == 1
    assert "2 sources read" in out


def test_an_archive_of_too_much_code_is_told(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(contents, "_MAX_TEXT", 3 << 20)
    with zipfile.ZipFile(tmp_path / "m.mar", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("MAR-INF/MANIFEST.json", MANIFEST)
        for number in range(3):
            archive.writestr(f"{number}.py", "#" * (2 << 20))
        archive.writestr("handler.py", "def handle(data, context):\n    return data\n")
    assert main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "not read completely: it has more than 3 MiB of code" in out
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


def test_links_in_a_circle_and_special_files_are_findings(tmp_path, capsys):
    (tmp_path / "again").symlink_to(tmp_path)
    (tmp_path / "config.properties").symlink_to("config.properties")
    (tmp_path / "log4j2.xml").symlink_to("/dev/zero")
    (tmp_path / "gone.py").symlink_to("nowhere")
    for name in ("start.sh", "m.mar", "handler.py"):
        os.mkfifo(tmp_path / name)
    (tmp_path / "Dockerfile").write_text("FROM x\n")
    assert main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.count("it is not a regular file. [not-read]") == 4
    assert "too many levels of symbolic links. [not-read]" in out
    assert "6 sources read" in out


@pytest.fixture(params=["pipe", "zero", "socket", "long"])
def special(request, tmp_path):
    """The path of a file that cannot be read to its end."""
    path = tmp_path / "config.properties"
    match request.param:
        case "pipe":
            os.mkfifo(path)
        case "zero":
            path.symlink_to("/dev/zero")
        case "socket":
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(path))
        case "long":
            path.write_bytes(b"model_store=x\n")
            os.truncate(path, 10 << 30)
    return path


def test_a_special_file_that_is_named_is_a_finding(special, capsys):
    for arguments in ([str(special)], ["--ts-config", str(special)]):
        assert main(arguments) == 0
        assert "config.properties cannot be read: " in capsys.readouterr().out


@pytest.mark.parametrize("key", ["log_config", "metrics_config"])
def test_a_special_file_that_a_configuration_names_is_a_finding(special, key, tmp_path, capsys):
    (tmp_path / "other.properties").write_text(f"{key}={special}\n")
    assert main(["--ts-config", str(tmp_path / "other.properties")]) == 0
    assert "config.properties cannot be read: " in capsys.readouterr().out


def test_special_files_of_requests_and_keys_are_told(special, tmp_path, capsys):
    url, request = "http://127.0.0.1:1", tmp_path / "requests.json"
    request.write_text(json.dumps([{"path": "/predictions/m", "file": str(special)}]))
    pair = ["--compare", url, url, "--requests"]
    for arguments in (
        ["--url", url, "--key-file", str(special)],
        [*pair, str(special)],
        [*pair, str(request)],
    ):
        assert main(arguments) == 2
        err = capsys.readouterr().err
        assert str(special) in err
        assert err.count("\n") == 1


def test_special_files_in_an_unpacked_archive_are_a_finding(tmp_path, capsys):
    for name in ("handler", "manifest"):
        (tmp_path / name / "MAR-INF").mkdir(parents=True)
        (tmp_path / name / "up").symlink_to("..")
    (tmp_path / "handler" / "MAR-INF" / "MANIFEST.json").write_text(MANIFEST)
    os.mkfifo(tmp_path / "handler" / "handler.py")
    (tmp_path / "manifest" / "MAR-INF" / "MANIFEST.json").symlink_to("/dev/zero")
    assert main([str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert out.count("cannot be opened: it is not a regular file. [archive-unusable]") == 2


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("Dockerfile", f"FROM pytorch/torchserve\nCMD {'[' * 100_000}\n"),
        ("config.properties", f"model_store=x\nmodels={'[' * 100_000}\n"),
        ("config.properties", f"model_snapshot={'[' * 100_000}\n"),
        ("log4j2.xml", f"<Configuration>MODEL_LOG{'<a>' * 100_000}"),
        ("model-config.yaml", f"minWorkers: {'[' * 20_000}\n"),
        ("pod.yaml", f"image: pytorch/torchserve\n---\n{'{a: ' * 20_000}\n"),
    ],
)
def test_text_that_is_nested_too_deeply_is_a_finding(tmp_path, capsys, name, text):
    (tmp_path / name).write_text(text)
    main([str(tmp_path)])
    assert f"  {name}" in capsys.readouterr().out


def test_a_key_file_that_is_nested_too_deeply_is_told(tmp_path, capsys):
    (tmp_path / "key_file.json").write_text("[" * 100_000)
    arguments = ["--url", "http://127.0.0.1:1", "--key-file", str(tmp_path / "key_file.json")]
    assert main(arguments) == 2
    assert "is not a key_file.json of a server" in capsys.readouterr().err


def test_no_more_text_is_read_than_is_promised(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sources, "_MAX_TEXT", 100)
    for number in range(4):
        (tmp_path / f"{number}.properties").write_text(f"model_store={'x' * 60}\n")
    assert main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "only its first 0 MiB are examined. [not-read]" in out
    assert "3 sources read" in out


def test_a_tar_with_a_header_of_any_length_is_refused(tmp_path, capsys):
    with tarfile.open(tmp_path / "m.tar.gz", "w:gz") as archive:
        member = tarfile.TarInfo("m/handler.py")
        member.pax_headers = {"comment": "x" * (1 << 20)}
        archive.addfile(member)
    assert main([str(tmp_path)]) == 1
    assert "Archive has a header of more than" in capsys.readouterr().out


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2])
def test_a_member_that_is_larger_than_its_header_says_takes_no_memory(tmp_path, capsys, method):
    path = tmp_path / "m.mar"
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("handler.py", bytes(64 << 20))
    # The size in both headers becomes 100.
    path.write_bytes(path.read_bytes().replace(struct.pack("<I", 64 << 20), struct.pack("<I", 100)))
    tracemalloc.start()
    assert main([str(tmp_path)]) == 1
    assert tracemalloc.get_traced_memory()[1] < 32 << 20
    tracemalloc.stop()
    assert "[archive-unusable]" in capsys.readouterr().out


def test_what_files_say_cannot_control_the_terminal(tmp_path, capsys):
    (tmp_path / f"h{CONTROLS}.py").write_text("from ts.nope import x\n")
    text = f"inference_address=a{CONTROLS}\nnumber_of_netty_threads=4\r\n"
    (tmp_path / "config.properties").write_text(text)
    for arguments in ([], ["--verbose"], ["--write", "--yes"], ["--json"]):
        main([str(tmp_path), *arguments])
        told = "".join(capsys.readouterr())
        assert told.replace("\r\n", "").replace("\n", "").isprintable()
        assert "\\u001b]0;x" in told
    assert json.loads(told)["findings"]


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
    assert capsys.readouterr().err.startswith("marserve doctor: aaa")


@pytest.mark.parametrize("seconds", ["nan", "inf", "0", "x"])
def test_a_time_that_is_none_is_refused(seconds, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path), "--load", "--load-timeout", seconds])
    assert ended.value.code == 2
    assert "--load-timeout" in capsys.readouterr().err
