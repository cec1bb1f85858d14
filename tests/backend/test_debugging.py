import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from marserve.backend.debugging import DebuggedModel
from marserve.backend.protocol import Input, Load, Part, Predict, Reply


@pytest.fixture(autouse=True)
def as_it_was(tmp_path, monkeypatch):
    """A debugged worker is a process of its own, which may change what it likes."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before, modules = signal.getsignal(signal.SIGINT), set(sys.modules)
    loops = []
    new_loop = asyncio.new_event_loop

    def kept_loop():
        loops.append(new_loop())
        return loops[-1]

    monkeypatch.setattr(asyncio, "new_event_loop", kept_loop)
    yield
    signal.signal(signal.SIGINT, before)
    for loop in loops:  # a worker keeps its loop until it ends
        loop.close()
        asyncio.set_event_loop(None)
    for name in set(sys.modules) - modules:
        if name.startswith("debugged_"):
            del sys.modules[name]


@pytest.fixture
def write(tmp_path):
    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    return write


@pytest.fixture
def ask(tmp_path, monkeypatch):
    """Send batches to one model, as its worker would."""
    made = []
    monkeypatch.chdir(tmp_path)

    def ask(count=1, send=lambda piece: None, **options):
        settings = {
            "model_name": "m",
            "model_dir": str(tmp_path),
            "handler": "debugged_handler.py",
            "batch_size": count,
            "gpu_id": None,
            "limit_max_image_pixels": True,
            "max_response_bytes": 1000,
            "server_version": "0",
            **options,
        }
        if not made:
            made.append(DebuggedModel(Load(**settings), lambda number, frame: None))
        each = Input("id", {}, [Part("body", "", bytearray(b"x"))])
        return made[0].predict(Predict([each] * count), send)

    return ask


def body(reply: Reply) -> Any:
    return json.loads(bytes(reply.predictions[0].body))


def handler(answer: str, before: str = "") -> str:
    return f"{before}\ndef handle(data, context):\n    return [{answer}] * len(data or [])\n"


def test_a_module_that_the_handler_imports_is_followed_too(write, ask):
    write("debugged_helper.py", "word = 1")
    write("debugged_handler.py", handler("word", "from debugged_helper import word"))
    assert body(ask()) == 1
    write("debugged_helper.py", "word = 22")
    assert body(ask()) == 22


def test_a_module_that_is_imported_during_a_request_is_followed(write, ask):
    write("debugged_package/__init__.py", "")
    write("debugged_package/late.py", "word = 1")
    write(
        "debugged_handler.py",
        handler("__import__('debugged_package.late').late.word"),
    )
    assert body(ask()) == 1
    write("debugged_package/late.py", "word = 22")
    assert body(ask()) == 22


def test_a_setting_that_the_handler_reads_is_followed(write, ask):
    write("names.json", "[1]")
    before = (
        "import json, pathlib\n"
        "names = json.loads((pathlib.Path(__file__).parent / 'names.json').read_text())"
    )
    write("debugged_handler.py", handler("names", before))
    assert body(ask()) == [1]
    write("names.json", "[22]")
    assert body(ask()) == [22]


def test_what_has_not_changed_is_not_loaded_again(write, ask):
    write("debugged_handler.py", handler("calls.append(1) or len(calls)", "calls = []"))
    assert body(ask()) == 2  # the first call initialised it
    assert body(ask()) == 3


def test_packages_that_are_installed_below_the_model_stay(write, ask):
    write("venv/lib/site-packages/debugged_installed.py", "loads = []")
    folder = Path(sys.path[0]) / "venv/lib/site-packages"
    before = (
        f"import sys; sys.path.append('{folder}')\n"
        "from debugged_installed import loads\n"
        "loads.append(1)"
    )
    source = handler("len(loads)", before)
    write("debugged_handler.py", source)
    assert body(ask()) == 1
    write("debugged_handler.py", source + "\n")
    assert body(ask()) == 2


def test_a_module_that_only_says_it_has_a_file_stays(write, ask):
    """As torch.ops does: its file is called _ops.py, wherever one is."""
    make = "import sys, types; sys.modules['debugged_ops'] = ops = types.ModuleType('ops')"
    answer = "'debugged_ops' in sys.modules"
    write("debugged_handler.py", handler(answer, f"{make}\nops.__file__ = '_ops.py'"))
    assert body(ask()) is True
    write("debugged_handler.py", handler(answer, "import sys"))
    assert body(ask()) is True


def test_each_request_of_a_failed_batch_gets_the_traceback(write, ask):
    write("debugged_handler.py", handler("len(data) // 0 if data else 0"))
    reply = ask(2)
    assert (reply.code, [each.status for each in reply.predictions]) == (200, [503, 503])
    assert body(reply)["traceback"][-1].startswith("ZeroDivisionError: ")


def test_the_traceback_begins_in_the_authors_file(write, ask):
    source = """
from ts.torch_handler.base_handler import BaseHandler
class Handler(BaseHandler):
    def initialize(self, context):
        self.initialized = True
    def preprocess(self, data):
        return {statement}
"""
    write("debugged_handler.py", source.format(statement="1 / 0"))
    assert body(ask())["traceback"][1].endswith("in preprocess")
    write("debugged_handler.py", source.format(statement="data"))  # its model is None
    assert body(ask())["traceback"][1].endswith("in handle")


def test_a_wrong_result_is_reported_in_the_answer(write, ask):
    write("debugged_handler.py", "def handle(data, context):\n    return {}")
    assert body(ask())["traceback"] == ["The handler returned dict, not a list."]


def test_a_handler_that_is_a_coroutine_is_debugged_one_by_one(write, ask):
    source = """
import asyncio
class Handler:
    def initialize(self, context):
        pass
    async def handle(self, data, context):
        await asyncio.sleep(0)
        context.send_intermediate(["one "])
        {statement}
        return ["two"]
"""
    pieces = []
    write("debugged_handler.py", source.format(statement="pass"))
    assert bytes(ask(send=pieces.append, asynchronous=True).predictions[0].body) == b"two"
    assert bytes(pieces[0].predictions[0].body) == b"one "
    for statement in ("raise SystemExit", "raise KeyboardInterrupt"):
        write("debugged_handler.py", source.format(statement=statement))
        assert body(ask())["traceback"][-1] == statement.split()[1]
