import asyncio
import importlib.machinery
import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from marserve.backend.context import Context
from marserve.backend.errors import HandlerUnusable
from marserve.backend.loader import find_handler, load_service
from marserve.backend.metrics import MetricsStore
from marserve.backend.protocol import Input, Load, Part, Predict
from marserve.backend.service import Service

OWN = "ts.torch_handler"

FUNCTION = """
calls = []

def handle(data, context):
    calls.append(data)
    return data

def other(data, context):
    return "other"
"""

CLASS = """
import collections
from decimal import Decimal            # imported classes do not count

class MyHandler:
    def initialize(self, context):
        self.name = context.model_name

    def handle(self, data, context):
        return [self.name, *data]
"""

TWO_CLASSES = """
class Helper:
    pass

class Second:
    def initialize(self, context):
        pass

    def handle(self, data, context):
        return ["second"]
"""


@pytest.fixture(autouse=True)
def _clean_imports(tmp_path, monkeypatch):
    """Imports of a test are forgotten with it; the model directory comes first, as in a worker."""
    monkeypatch.syspath_prepend(tmp_path)
    before = dict(sys.modules)
    yield
    for name in sys.modules.keys() - before.keys():
        if not name.startswith(("marserve", "ts.")):
            del sys.modules[name]


@pytest.fixture
def write(tmp_path):
    def written(source, name="my_model_handler.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)

    return written


@pytest.fixture
def context(tmp_path):
    return Context("kitten", str(tmp_path), None, 1, None, "1", metrics=MetricsStore())


@pytest.mark.parametrize(
    "name", ["my_model_handler.py", "my_model_handler", "some/where/my_model_handler.py"]
)
def test_the_archives_file_is_found_by_any_spelling_of_its_name(name, write, context):
    write(FUNCTION)
    entry_point = find_handler(name).entry_point
    assert entry_point(["x"], context) == ["x"]


def test_a_function_is_initialised_by_a_call_without_data(write, context):
    write(FUNCTION)
    initialize, entry_point, *_ = find_handler("my_model_handler")
    initialize(context)
    entry_point(["x"], context)
    assert sys.modules["my_model_handler"].calls == [None, ["x"]]


def test_another_function_can_be_named(write, context):
    write(FUNCTION)
    entry_point = find_handler("my_model_handler.py:other").entry_point
    assert entry_point(["x"], context) == "other"


def test_a_function_goes_before_a_class(write, context):
    write(CLASS + FUNCTION)
    assert find_handler("my_model_handler").entry_point(["x"], context) == ["x"]


def test_the_only_class_is_the_handler(write, context):
    write(CLASS)
    initialize, entry_point, *_ = find_handler("my_model_handler.py")
    initialize(context)
    assert entry_point(["x"], context) == ["kitten", "x"]


def test_a_class_can_be_named_and_may_then_have_neighbours(write, context):
    write(TWO_CLASSES)
    initialize, entry_point, *_ = find_handler("my_model_handler.py:Second")
    initialize(context)
    assert entry_point([], context) == ["second"]


@pytest.mark.parametrize("function", ["handle", "elsewhere"])
def test_a_function_named_of_a_file_with_only_a_class_means_the_class(
    function, write, context, caplog
):
    """As SageMaker's archives have it: handler_service.py:handle, and in it a class."""
    write(CLASS)
    initialize, entry_point, *_ = find_handler(f"my_model_handler.py:{function}")
    initialize(context)
    assert entry_point(["x"], context) == ["kitten", "x"]
    assert ("no function or class 'elsewhere'" in caplog.text) == (function == "elsewhere")


def test_a_handle_replaced_while_initialising_is_the_one_called(write, context):
    write(
        "class Model:\n"
        "    def initialize(self, context):\n"
        "        self.handle = lambda data, context: ['replaced']\n"
        "    def handle(self, data, context):\n"
        "        return ['original']\n"
    )
    initialize, entry_point, *_ = find_handler("my_model_handler")
    initialize(context)
    assert entry_point([], context) == ["replaced"]


@pytest.mark.parametrize(
    ("source", "name", "error", "complaint"),
    [
        (TWO_CLASSES, "my_model_handler", ValueError, r"only one class .*\['Helper', 'Second'\]"),
        ("x = 1", "my_model_handler", ValueError, r"only one class .*\[\]"),
        (FUNCTION, "my_model_handler:gone", ValueError, r"function or class 'gone'. .*one class"),
        ("class A:\n    pass", "my_model_handler", ValueError, "Expect handle method in class A"),
        (
            "class A:\n    def handle(self, data, context):\n        pass",
            "my_model_handler",
            AttributeError,
            "initialize",
        ),
        ("import not_installed_xyz", "my_model_handler", ImportError, "'not_installed_xyz'"),
        ("from json import gone_xyz", "my_model_handler", ImportError, "gone_xyz"),
        ("raise KeyError('mine')", "my_model_handler", KeyError, "mine"),
        ("def broken(", "my_model_handler", SyntaxError, "my_model_handler.py"),
        ("", "gone_handler.py", ImportError, "There is no handler 'gone_handler.py'"),
    ],
)
def test_what_cannot_be_a_handler_is_refused_with_the_real_reason(
    source, name, error, complaint, write
):
    write(source)
    with pytest.raises(error, match=complaint):
        find_handler(name)


def own_handler(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    module = types.ModuleType(f"{OWN}.{name}")
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, OWN, types.ModuleType(OWN))
    monkeypatch.setitem(sys.modules, module.__name__, module)


def test_without_a_file_in_the_archive_it_is_one_of_ours(monkeypatch, context):
    own_handler(monkeypatch, "built_in_xyz", handle=lambda data, _: ["ours"])
    assert find_handler("built_in_xyz").entry_point([], context) == ["ours"]


def test_the_archives_file_goes_before_ours(monkeypatch, write, context):
    own_handler(monkeypatch, "my_model_handler", handle=lambda data, _: ["ours"])
    write(FUNCTION)
    assert find_handler("my_model_handler").entry_point(["theirs"], context) == ["theirs"]


def test_a_dependency_that_one_of_ours_misses_is_reported_as_itself(tmp_path, monkeypatch):
    file = tmp_path / "ours.txt"
    file.write_text("import not_installed_xyz\n")
    name = f"{OWN}.needs_more_xyz"
    loader = importlib.machinery.SourceFileLoader(name, str(file))

    class Finder:
        def find_spec(self, wanted, *_):
            return importlib.util.spec_from_loader(name, loader) if wanted == name else None

    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    with pytest.raises(ImportError, match="'not_installed_xyz'"):
        find_handler("needs_more_xyz")


# -- the whole load --------------------------------------------------------------------------------


def make_load(tmp_path: Path, **changes: Any) -> Load:
    fields: dict[str, Any] = {
        "model_name": "kitten",
        "model_dir": str(tmp_path),
        "handler": "my_model_handler.py",
        "batch_size": 7,
        "gpu_id": 3,
        "limit_max_image_pixels": False,
        "max_response_bytes": 1000,
        "server_version": "1.2.3",
    }
    return Load(**{**fields, **changes})


SHOWS_CONTEXT = """
def handle(data, context):
    if data is None:
        handle.context = context
    return [{"seen": str(row["body"])} for row in data or ()]
"""


def test_the_context_tells_what_the_load_set(tmp_path, write):
    write(SHOWS_CONTEXT)
    write(
        '{"model": {"modelName": "m", "configFile": "model.yaml"}, "x": 1}', "MAR-INF/MANIFEST.json"
    )
    write("minWorkers: 1\nhandler:\n  size: 5\n", "model.yaml")
    load_service(make_load(tmp_path))
    context = sys.modules["my_model_handler"].handle.context
    assert context.model_name == "kitten"
    assert context.manifest["x"] == 1
    assert context.model_yaml_config == {"minWorkers": 1, "handler": {"size": 5}}
    properties = context.system_properties
    assert {name: properties[name] for name in ("model_dir", "gpu_id", "batch_size")} == {
        "model_dir": str(tmp_path),
        "gpu_id": 3,
        "batch_size": 7,
    }
    assert properties["limit_max_image_pixels"] is False
    assert properties["server_version"] == "1.2.3"


def test_without_manifest_and_yaml_there_is_nothing_to_tell(tmp_path, write):
    write(SHOWS_CONTEXT)
    load_service(make_load(tmp_path))
    context = sys.modules["my_model_handler"].handle.context
    assert (context.manifest, context.model_yaml_config) == (None, {})


def test_a_yaml_that_cannot_be_read_fails_the_load(tmp_path, write):
    write(SHOWS_CONTEXT)
    write('{"model": {"modelName": "m", "configFile": "gone.yaml"}}', "MAR-INF/MANIFEST.json")
    with pytest.raises(OSError, match=r"gone\.yaml"):
        load_service(make_load(tmp_path))


@pytest.mark.parametrize(
    ("server", "module", "seen"),
    [
        ("true", None, "[1]"),
        (None, None, "[1]"),
        ("false", None, "bytearray(b'[1]')"),
        ("true", "false", "bytearray(b'[1]')"),
        ("false", "true", "[1]"),
    ],
)
def test_the_service_decodes_as_the_environment_says(
    server, module, seen, tmp_path, write, monkeypatch
):
    monkeypatch.setenv("TS_DECODE_INPUT_REQUEST", server or "")
    if server is None:
        monkeypatch.delenv("TS_DECODE_INPUT_REQUEST")
    own = f"import os\nos.environ['TS_DECODE_INPUT_REQUEST'] = {module!r}\n" if module else ""
    write(own + SHOWS_CONTEXT)
    service = load_service(make_load(tmp_path))
    part = Part("body", "application/json", bytearray(b"[1]"))
    [prediction] = service.predict(Predict([Input("id", {}, [part])])).predictions
    assert seen.encode() in bytes(prediction.body)


def test_somebody_elses_ts_is_refused(tmp_path, monkeypatch):
    theirs = types.ModuleType("ts")
    theirs.__file__ = "/their/ts/__init__.py"
    monkeypatch.setitem(sys.modules, "ts", theirs)
    with pytest.raises(ImportError, match=r"/their/ts/__init__\.py"):
        load_service(make_load(tmp_path))


# -- envelopes -------------------------------------------------------------------------------------


def in_envelope(envelope: str, model_dir: Path, **headers: str) -> Any:
    service = load_service(make_load(model_dir, envelope=envelope))
    part = Part("body", "application/json", bytearray(b'{"instances": [1, 2]}'))
    return service.predict(Predict([Input("id", headers, [part])]))


def test_an_envelope_wraps_the_entry_point_and_not_the_initialisation(tmp_path, write):
    write("def handle(data, context):\n    return data and [one * 2 for one in data]\n")
    [prediction] = in_envelope("json", tmp_path).predictions
    assert json.loads(bytes(prediction.body)) == {"predictions": [2, 4]}


def test_a_question_for_a_description_carries_nothing_to_unwrap(tmp_path, write):
    write("def handle(data, context):\n    return ['described']\n")
    [prediction] = in_envelope("json", tmp_path, describe="True").predictions
    assert bytes(prediction.body) == b"described"


def test_an_envelope_nobody_knows_fails_the_load(tmp_path, write):
    write(FUNCTION)
    with pytest.raises(ImportError, match="no request envelope 'parcel'"):
        in_envelope("parcel", tmp_path)


def test_an_asynchronous_handler_fits_no_envelope(tmp_path, write):
    write(FUNCTION)
    with pytest.raises(HandlerUnusable, match="cannot wrap"):
        load_service(make_load(tmp_path, envelope="json", asynchronous=True))


COROUTINE = "seen = []\nasync def handle(data, context):\n    seen.append(data)\n    return data\n"


def test_a_coroutine_is_run_once_to_initialise_it(tmp_path, write):
    write(COROUTINE)
    load_service(make_load(tmp_path, asynchronous=True), asyncio.run)
    assert sys.modules["my_model_handler"].seen == [None]


def test_a_class_with_coroutines_needs_a_worker_that_can_wait(tmp_path, write):
    """vllm_handler without asyncCommunication started its engine and failed each request."""
    write(
        "class Handler:\n"
        "    def initialize(self, context): raise AssertionError('the engine is started')\n"
        "    async def handle(self, data, context): return data\n"
    )
    with pytest.raises(HandlerUnusable, match="needs asyncCommunication: true"):
        load_service(make_load(tmp_path))


def test_a_coroutine_needs_a_worker_that_can_wait(tmp_path, write):
    write(COROUTINE)
    with pytest.raises(HandlerUnusable, match="asyncCommunication"):
        load_service(make_load(tmp_path))


# -- samples ---------------------------------------------------------------------------------------

SAMPLE = "    def sample_input(self):\n        return self.name\n"


@pytest.mark.parametrize(
    ("source", "sample"),
    [
        (CLASS, None),
        (CLASS + SAMPLE, "kitten"),
        (CLASS + "    sample_input = b'no method'\n", None),
        (FUNCTION, None),
        (
            CLASS + SAMPLE + "\none = MyHandler()\none.name = 'shared'\nhandle = one.handle\n",
            "shared",
        ),
    ],
    ids=["none", "method", "attribute", "function", "bound method"],
)
def test_a_handler_is_asked_for_its_sample_if_it_has_a_method_for_it(
    source, sample, write, context
):
    write(source)
    handler = find_handler("my_model_handler")
    if "one = " not in source:
        handler.initialize(context)
    service = Service(handler.entry_point, context, owner=handler.owner)
    assert service.sample_input() == sample


STAGED = (
    CLASS
    + """
    def overlap_obstacle(self):
        return "" if self.name == "kitten" else "its name is " + self.name
    def concurrent_inferences(self):
        return 1
"""
)


@pytest.mark.parametrize(
    ("source", "asked", "is_on"),
    [
        (STAGED, True, True),
        (STAGED, False, False),
        (FUNCTION, False, False),
        (CLASS, False, False),
    ],
)
def test_stages_overlap_where_they_are_to_and_can(source, asked, is_on, tmp_path, write):
    write(source)
    service = load_service(make_load(tmp_path, overlap_stages=asked))
    assert (service.stages is not None) is is_on


@pytest.mark.parametrize(
    ("source", "changes", "reason"),
    [
        (FUNCTION, {}, "the handler is a function"),
        (CLASS, {}, "MyHandler is not a BaseHandler"),
        (STAGED, {"model_name": "cat"}, "its name is cat"),
        (STAGED, {"envelope": "json"}, "the request envelope 'json' is around the handler"),
        (STAGED, {"asynchronous": True}, "the handler is a coroutine"),
    ],
)
def test_stages_that_are_to_overlap_and_cannot_are_reported(
    source, changes, reason, tmp_path, write
):
    write(source)
    with pytest.raises(HandlerUnusable, match=f"overlapStages cannot be true: {reason}"):
        load_service(make_load(tmp_path, overlap_stages=True, **changes))


@pytest.mark.parametrize(
    ("config", "members", "is_told"),
    [
        ("optimization: {precision: bf16}\n", "", True),
        ("optimization: {precision: bf16}\n", "    is_optimized = True\n", False),
        ("batchSize: 2\n", "", False),
    ],
)
def test_a_section_that_the_handler_does_not_apply_is_a_warning(
    config, members, is_told, tmp_path, write
):
    write(
        f"class Own:\n{members}    def initialize(self, context): pass\n"
        "    def handle(self, data, context): return data\n"
    )
    write('{"model": {"modelName": "m", "configFile": "model.yaml"}}', "MAR-INF/MANIFEST.json")
    write(config, "model.yaml")
    warnings = load_service(make_load(tmp_path)).context.load_warnings
    assert [each.partition(" of ")[0] for each in warnings] == ["optimization"] * is_told
