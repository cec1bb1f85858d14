"""``marserve run``, as its users start it."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from servers import make_archive

pytestmark = pytest.mark.integration

MARSERVE = Path(sys.executable).with_name("marserve")

LENGTHS = """
def handle(data, context):
    if data is None:
        return
    print("on its way")
    return [{"length": len(row["body"]), "type": type(row["body"]).__name__} for row in data]
"""
RAISES = """
def handle(data, context):
    if data is not None:
        raise KeyError("no such colour")
"""

Run = Callable[..., "subprocess.CompletedProcess[bytes]"]


@pytest.fixture
def run(tmp_path):
    """Run a handler over files; keywords: its source, or options."""

    def start(handler, *options, config="", **bodies):
        names = []
        for stem, body in bodies.items():
            name = stem.replace("_", ".")
            (tmp_path / name).write_bytes(body)
            names.append(name)
        archive = make_archive(tmp_path, handler, "m", config)
        inputs = ["--input", *names] if names else []
        return in_folder([archive.name, *inputs, *options])

    def in_folder(arguments):
        return subprocess.run(
            [MARSERVE, "run", *arguments], cwd=tmp_path, capture_output=True, timeout=60, input=b""
        )

    return start


def test_several_inputs_are_one_batch_and_only_answers_are_on_stdout(run):
    source = """
def handle(data, context):
    print("printed")
    size = context.system_properties["batch_size"]
    return [f"{len(data or [])} of {size}"] * 2
"""
    done = run(source, a_txt=b"1", b_txt=b"2")
    assert (done.returncode, done.stdout) == (0, b"2 of 2\n2 of 2\n")
    assert b"printed" in done.stderr
    assert b"a.txt: 200" in done.stderr


@pytest.mark.parametrize(
    ("name", "options", "seen"),
    [
        ("a_json", (), "dict"),
        ("a_txt", (), "str"),
        ("a_bin", (), "bytearray"),
        ("a_json", ("--content-type", ""), "bytearray"),
        ("a_bin", ("--content-type", "application/json; charset=utf-8"), "dict"),
    ],
)
def test_content_types_come_from_names_or_from_the_option(run, name, options, seen):
    done = run(LENGTHS, *options, **{name: b"{}"})
    assert f'"type": "{seen}"'.encode() in done.stdout


def test_a_handler_that_raises_shows_the_clients_answer_and_its_traceback(run):
    done = run(RAISES, a_txt=b"x")
    assert done.returncode == 1
    assert b'"code": 503' in done.stdout
    assert b'"message": "Prediction failed"' in done.stdout
    assert b'raise KeyError("no such colour")' in done.stderr


@pytest.mark.parametrize("statement", ["1 / 0", "import sys; sys.exit(0)"])
def test_a_model_that_does_not_load_ends_with_1_and_the_traceback(run, statement):
    done = run(f"def handle(data, context):\n    {statement}", a_txt=b"x")
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"Traceback" in done.stderr
    assert statement.encode() in done.stderr


def test_without_inputs_the_model_is_loaded_and_nothing_is_predicted(run):
    done = run(
        "import sys\nprint('loading')\ndef handle(data, context):\n    assert data is None\n"
    )
    assert (done.returncode, done.stdout) == (0, b"")
    assert b"loading" in done.stderr
    assert run("raise OSError('no weights')").returncode == 1


def test_a_status_of_the_handlers_own_is_reported_and_400_is_a_failure(run):
    source = (
        "def handle(data, context):\n"
        '    context.set_response_status(422, "Too blue")\n'
        '    return ["no"]'
    )
    done = run(source, a_txt=b"x")
    assert (done.returncode, done.stdout) == (1, b"no\n")
    assert b"a.txt: 422 Too blue" in done.stderr


def test_bytes_leave_unchanged(run):
    done = run("def handle(data, context):\n    return [bytes(range(256))]", a_bin=b"x")
    assert done.stdout == bytes(range(256))


def test_an_explanation_is_asked_for(run):
    source = 'def handle(data, context):\n    return [context.get_request_header(0, "explain")]'
    assert run(source, "--explain", a_txt=b"x").stdout == b"True\n"


def test_answers_in_steps_go_on_to_their_end(run):
    source = """
left = {"a": 3, "b": 1}
def handle(data, context):
    if data is None:
        return
    words = [context.get_request_id(place)[4:5] for place in range(len(data))]
    for word in words:
        left[word] -= 1
    context.stopping_criteria = [lambda _, word=word: left[word] == 0 for word in words]
    return [f"{word}{left[word]} " for word in words]
"""
    config = "continuousBatching: true\nbatchSize: 2\n"
    assert run(source, config=config, a_txt=b"x").stdout == b"a2 a1 a0 \n"
    both = run(source, config=config, a_txt=b"x", b_txt=b"x")
    assert both.stdout == b"a2 \nb0 \na1 a0 \n"


def test_a_handler_that_is_a_coroutine_runs(run):
    source = """
import asyncio
from ts.handler_utils.utils import send_intermediate_predict_response
class Handler:
    def initialize(self, context):
        self.loop = asyncio.get_event_loop()
    async def handle(self, data, context):
        await asyncio.sleep(0)
        send_intermediate_predict_response(["one "], context.request_ids, "", 200, context)
        return ["two"]
"""
    assert run(source, config="asyncCommunication: true\n", a_txt=b"x").stdout == b"one two\n"


def test_a_handlers_file_replaces_that_of_the_archive(run, tmp_path):
    (tmp_path / "mine.py").write_text(LENGTHS)
    done = run(RAISES, "--handler", "mine.py", a_txt=b"four")
    assert b'"length": 4' in done.stdout


def test_the_configuration_file_of_the_place_counts(run, tmp_path):
    (tmp_path / "config.properties").write_text("service_envelope=json\n")
    source = "def handle(data, context):\n    return [one * 2 for one in data or []]"
    done = run(source, a_json=b'{"instances": [1, 2]}')
    assert b'"predictions": [' in done.stdout, done.stderr
    assert b"config.properties" in done.stderr


def test_a_directory_is_run_where_it_lies(tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "words.txt").write_text("hidden")
    (tmp_path / "m" / "handler.py").write_text(
        "def handle(data, context):\n    return [open('words.txt').read()]"
    )
    command = [MARSERVE, "run", "m", "--handler", "handler.py", "--input", "-"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=60, input=b"")
    assert done.stdout == b"hidden\n", done.stderr
    assert not list((tmp_path / "m").glob("*.mar"))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["gone.mar", "--input", "-"], b"There is no"),
        ([".", "--input", "gone.txt"], b"No such file or directory: 'gone.txt'"),
        (
            ["."],
            b"No handler is named. MODEL is an archive, a directory with MAR-INF/MANIFEST.json",
        ),
    ],
)
def test_what_is_not_there_is_reported_in_one_line(tmp_path, arguments, sentence):
    command = [MARSERVE, "run", *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=60, input=b"")
    assert done.returncode == 1
    assert sentence in done.stderr
    assert done.stderr.count(b"\n") == 1
