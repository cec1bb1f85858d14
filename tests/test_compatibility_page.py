"""docs/compatibility.md, held against the code: what a user can write down stands on the page.

Both ways: what the code has and the page lacks is a gap; what the page calls same or better and the
code does not have is a false promise. What the code has is asked of the code wherever it can tell
(parsers, route tables, OpenAPI documents, what a reader reads); else it is searched in the sources.
"""

import argparse
import ast
import importlib.util
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import pytest

import ts
from marserve.backend import manifest
from marserve.backend.context import Context, RequestProcessor
from marserve.backend.metrics import CachingMetric, Metric, MetricsStore
from marserve.frontend import cli, errors, server
from marserve.frontend.api.description import description_routes
from marserve.frontend.api.door import ANY_OTHER
from marserve.frontend.api.inference import inference_routes
from marserve.frontend.api.loggers import logger_routes
from marserve.frontend.api.management import management_routes
from marserve.frontend.api.metrics import metrics_routes
from marserve.frontend.api.openapi import describe_listener
from marserve.frontend.api.openapi_schemas import SCHEMAS
from marserve.frontend.api.routing import shared_routes
from marserve.frontend.bench import options as bench_options
from marserve.frontend.configuration import loading, saved_models, values
from marserve.frontend.configuration.config import Config
from marserve.frontend.logs.setup import configure_logging, logger_levels
from marserve.frontend.models.model_yaml import Autoscaling
from marserve.frontend.models.registry import ModelRegistry
from marserve.frontend.models.settings import Requested, settle
from marserve.frontend.telemetry.metrics import Metrics
from marserve.frontend.telemetry.metrics_config import KINDS, load_metrics_config
from marserve.handlers import archiver, launcher, llm_launcher, utils

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "compatibility.md"
VERDICTS = ("same", "better", "refused", "later")
PROMISED = ("same", "better")


# -- the page --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A row of a table: under which headings, its names, its verdict."""

    chapter: str
    section: str
    cells: tuple[str, ...]

    @property
    def names(self) -> list[str]:
        return re.findall(r"`([^`]+)`", self.cells[0])

    @property
    def verdict(self) -> str:
        return self.cells[1]


@lru_cache(maxsize=1)
def rows() -> tuple[Row, ...]:
    return tuple(read_rows(PAGE.read_text(encoding="utf-8")))


def read_rows(text: str) -> Iterator[Row]:
    chapter = section = ""
    for line in text.splitlines():
        if line.startswith("## "):
            chapter, section = line[3:], ""
        elif line.startswith("### "):
            section = line[4:]
        elif line.startswith("| ") and chapter:
            cells = tuple(cell.strip() for cell in line.strip("|").split("|"))
            if cells[0] != "Name":
                yield Row(chapter, section, cells)


def named(*headings: str, verdicts: tuple[str, ...] = VERDICTS) -> set[str]:
    """The names under these headings, of chapters or of sections."""
    found = [row for row in rows() if {row.chapter, row.section} & set(headings)]
    assert found, f"nothing stands under {headings}"
    return {name for row in found if row.verdict in verdicts for name in row.names}


def check(
    *headings: str, code: set[str], more: set[str] | None = None, without: set[str] | None = None
) -> None:
    """What the code has stands under the headings; what is promised there, the code has.

    Args:
        code: Names that the code has.
        more: Names that may be promised besides.
        without: Names under the headings that are about something else.
    """
    assert code, "the code is not asked rightly: it has nothing"
    assert code - named(*headings) == set(), "missing from the page"
    promised = named(*headings, verdicts=PROMISED) - (without or set())
    assert promised - code - (more or set()) == set(), "promised, but not in the code"


def test_every_row_has_a_name_a_verdict_and_notes() -> None:
    assert len(rows()) > 100
    assert [row.cells for row in rows() if len(row.cells) != 3 or not row.cells[0]] == []
    assert [row.cells for row in rows() if row.verdict not in VERDICTS] == []


def test_whatever_is_not_the_same_is_explained() -> None:
    unexplained = [row.cells for row in rows() if row.verdict in ("better", "refused")]
    assert [cells for cells in unexplained if not cells[2]] == []


def test_no_name_has_two_verdicts_in_one_table() -> None:
    seen: dict[tuple[str, str, str], str] = {}
    for row in rows():
        for name in row.names:
            earlier = seen.setdefault((row.chapter, row.section, name), row.cells[0])
            assert earlier == row.cells[0], f"{name} stands in two rows of {row.section}"


def test_links_within_the_page_lead_somewhere() -> None:
    text = PAGE.read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in headings}
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) - anchors == set()


# -- configuration ---------------------------------------------------------------------------------

KEY_TABLES = (
    "Listeners",
    "TLS",
    "Models",
    "Access",
    "Workers",
    "Metrics, logs, environment",
)


def supported() -> set[str]:
    return {key.name for key in loading.supported_keys()}


def test_configuration_keys() -> None:
    known = supported() | loading._WITHOUT_EFFECT.keys() | loading._NOT_YET | loading._RECORDS
    check(*KEY_TABLES, code=set(known))
    assert named(*KEY_TABLES) - known == set(), "told as an unknown key"


def test_the_verdicts_of_keys_are_those_of_the_code() -> None:
    promised = named(*KEY_TABLES, verdicts=PROMISED)
    assert promised - supported() - loading._RECORDS == set()
    assert supported() & named(*KEY_TABLES, verdicts=("later",)) == set()
    assert loading._WITHOUT_EFFECT.keys() - named(*KEY_TABLES, verdicts=("refused",)) == set()


def test_members_of_models_and_of_snapshots() -> None:
    of_models = values._MODEL_NUMBERS | values._MODEL_BYSTANDERS | {values._MODEL_RUNTIME}
    of_models |= values._MODEL_BATCHING
    saved = saved_models.SavedModel(
        *("m", "1.0", True, "m.mar", 1, 1, 1, 0.1, 9, 9, "python", 2, "h"),
        is_automatic=True,
        batching=dict.fromkeys(saved_models.BATCHING),
        batch_costs=((1.0, 0.01, 5),),
    )
    snapshot = set(re.findall(r'"(\w+)":', saved_models.snapshot_json("name", 0, [saved])))
    code = of_models | (snapshot - {"models", "m", "1.0"})
    check("Members of `models` and of `model_snapshot`", code=set(code))


def test_environment_variables() -> None:
    read = set(re.findall(r'environ(?:ment)?(?:\.get\(|\[)"([A-Z][A-Z0-9_]+)"', sources()))
    read |= set(re.findall(r'"([A-Z][A-Z0-9_]+)" (?:not )?in os\.environ', sources()))
    given = set(re.findall(r'"((?:TS|OMP|LOG|LOCAL)_?[A-Z_]+)": ', sources()))
    by_rule = {loading._variable_name(key) for key in supported()}
    built = {f"TS_REQUEST_SEQUENCE_{part}" for part in ("ID", "START", "END")}
    assert all(name.lower() in vars(a_context()).values() for name in built)
    # Read by Python's tempfile; set by torch's launcher of ranks.
    others = {"TMPDIR", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"}
    table = "Environment variables"
    check(table, code=read, more=given | by_rule | built | others)
    irregular = {key for key in supported() if loading._variable_name(key) != f"TS_{key.upper()}"}
    assert {loading._variable_name(key) for key in irregular} - named(table) == set()


def test_keys_that_no_variable_overrides() -> None:
    text = PAGE.read_text(encoding="utf-8").partition("## Environment variables")[2]
    sentence = text.partition("but")[2].partition(":")[0]
    told = set(re.findall(r"`(\w+)`", sentence))
    # What is only recorded, or has a variable of its own, is no exception to the rule.
    assert told == loading._WITHOUT_ENV_NAME - {"tsConfigFile", "ts_open_inference_protocol"}


# -- command lines ---------------------------------------------------------------------------------


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    shown = (one for one in parser._actions if one.help is not argparse.SUPPRESS)
    return {option for action in shown for option in action.option_strings}


@pytest.mark.parametrize(
    ("table", "build"),
    [
        ("torchserve", cli.build_parser),
        ("marserve bench", bench_options.build_parser),
        ("torch-model-archiver", archiver.build_parser),
        ("python -m ts.llm_launcher", llm_launcher.build_parser),
    ],
)
def test_options(table: str, build: Callable[[], argparse.ArgumentParser]) -> None:
    options = options_of(build())
    check(table, code=options, without={one for one in named(table) if not one.startswith("-")})


# -- endpoints -------------------------------------------------------------------------------------

LISTENERS = ("Inference listener", "Management listener", "Metrics listener", "Every listener")
METHOD_AND_PATH = re.compile(r"([A-Z]+) (/\S*)")


def endpoints(*verdicts: str) -> set[tuple[str, str]]:
    found = map(METHOD_AND_PATH.fullmatch, named(*LISTENERS, verdicts=verdicts or VERDICTS))
    return {(one[1], one[2]) for one in found if one}


def documented() -> set[tuple[str, str]]:
    """Method and path of all that the listeners' own descriptions offer."""
    apis = ["Inference", "Management", "Metrics"]
    document = describe_listener(apis, "1.0", open_inference=True)
    described = {(method, path) for path, of in document["paths"].items() for method in of}
    return {(method.upper(), path) for method, path in described}


def routes() -> set[str]:
    """First segments of all paths that a door knows."""
    registry, anything = ModelRegistry(), cast("Any", object())
    tables = [
        inference_routes(registry, 1, open_inference=True),
        management_routes(anything, registry, tokens=anything, model_api=True, max_request_bytes=1),
        logger_routes(),
        metrics_routes(Metrics()),
        description_routes("Inference", open_inference=True),
    ]
    return {first for table in tables for first in table}


def first_segment(path: str) -> str:
    first = path.split("/")[1]
    return ANY_OTHER if first.startswith("{") else first


def test_every_table_of_routes_is_looked_at() -> None:
    makers = {name for name in vars(server) if name.endswith("_routes")}
    known = {
        inference_routes,
        management_routes,
        logger_routes,
        metrics_routes,
        description_routes,
        shared_routes,  # joins two of them
    }
    assert makers == {one.__name__ for one in known}


def test_routes() -> None:
    on_page = {first_segment(path) for _, path in endpoints()}
    assert routes() - on_page == set()
    promised = {first_segment(path) for _, path in endpoints(*PROMISED)}
    assert promised - routes() == set()


def test_endpoints() -> None:
    assert documented() - endpoints() == set(), "missing from the page"
    paths = {path for _, path in documented()}
    promised = {one for one in endpoints(*PROMISED) if one[0] != "OPTIONS" or one[1] not in paths}
    assert promised - documented() == set(), "promised, but not in the code"


def test_query_parameters() -> None:
    apis = ["Inference", "Management", "Metrics"]
    document = describe_listener(apis, "1.0", open_inference=True)
    operations = [operation for of in document["paths"].values() for operation in of.values()]
    parameters = [one for operation in operations for one in operation["parameters"]]
    check("Parameters", code={one["name"] for one in parameters if one["in"] == "query"})


def test_members_of_a_description() -> None:
    of_model = SCHEMAS["Model"]["properties"]
    parts = (of_model, SCHEMAS["Worker"]["properties"], of_model["jobQueueStatus"]["properties"])
    check("Members of a description", code={name for part in parts for name in part})
    below = [SCHEMAS[name]["properties"] for name in ("Batching", "BatchCosts", "BatchCost")]
    check("Under batching", code={name for part in below for name in part})
    past = {**SCHEMAS["BatchHistory"]["properties"], **SCHEMAS["PastBatch"]["properties"]}
    check("Members of past batches", code=set(past))


def test_errors() -> None:
    told = [one for one in vars(errors).values() if isinstance(one, type)]
    own = [one for one in told if issubclass(one, errors.ServeError)]
    code = {f"{one.status} {one.wire_type}" for one in own}
    # With a status of its own: a body that stalls, and what workers report.
    more = {"408 BadRequestException", "507 InternalServerException", "501"}
    check("Errors", code=code, more=more)


# -- model-config.yaml, metrics.yaml, manifest -----------------------------------------------------


class Recorder(dict[str, Any]):
    """A mapping that remembers what it was asked for."""

    def __init__(self, **members: Any) -> None:
        super().__init__(members)
        self.asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)


def test_model_config_yaml(tmp_path: Path) -> None:
    torchrun = Recorder()
    model_yaml = Recorder(torchrun=torchrun)
    settings = Config(model_store=tmp_path)
    settle(Requested(), model_yaml, {}, settings, gpus=0, default_workers=0)
    check("Read by the server", code=model_yaml.asked)
    check("Under torchrun", code=torchrun.asked)


def test_thresholds_of_autoscale(tmp_path: Path) -> None:
    def autoscaling(**thresholds: int) -> Autoscaling | None:
        found = {"autoscale": thresholds}
        config = Config(model_store=tmp_path)
        return settle(Requested(), found, {}, config, gpus=0, default_workers=0).autoscale

    names = named("Under autoscale")
    assert len(names) == len(vars(Autoscaling()))
    assert {name: autoscaling(**{name: 7}) == Autoscaling() for name in names} == dict.fromkeys(
        names, False
    )
    assert None not in {autoscaling(**{name: 7}) for name in names}


def test_manifest() -> None:
    check("Manifest", code={*manifest._MODEL_KEYS.values(), *manifest._TOP_KEYS.values()})


def test_metrics_yaml() -> None:
    code = inspect.getsource(inspect.getmodule(load_metrics_config) or ts)
    members = set(re.findall(r'entry\.get\("(\w+)"', code))
    sections = set(re.findall(r'_section\(sections, "(\w+)"', code))
    check("metrics.yaml", code={*KINDS, *members, *sections})


# -- metrics and logs ------------------------------------------------------------------------------


def test_metrics_of_the_server() -> None:
    own = set(re.findall(r'"(marserve_\w+)"', sources("frontend/telemetry", "frontend/server.py")))
    check("Of the server", code=own | load_metrics_config().ts.keys())


def test_metrics_of_handlers() -> None:
    stages = {f"ts_handler_{stage}" for stage in ("preprocess", "inference", "postprocess")}
    assert 'f"ts_handler_{' in sources("handlers/timer.py")
    built_in = set(load_metrics_config().model)
    check("Of handlers", code=built_in | stages, without={"[METRICS]"})


def test_log_files(tmp_path: Path) -> None:
    with configure_logging(tmp_path / "logs", tmp_path / "metrics"):
        code = {path.name for path in tmp_path.rglob("*.log")}
    check("Files", code=code)


def test_loggers() -> None:
    check("Loggers", code={name for name in logger_levels() if "." not in name})


def test_log_lines_are_written_somewhere() -> None:
    for line in named("Lines", verdicts=PROMISED):
        for piece in filter(None, map(str.strip, re.split(r"<[^>]*>", line))):
            assert piece in sources(), f"nothing writes {line!r}"
    for line in named("Lines", verdicts=("refused",)):
        assert line not in sources(), f"{line!r} is written after all"


# -- handlers --------------------------------------------------------------------------------------


def test_what_handlers_read_of_the_yaml() -> None:
    for name in named("Read by handlers", verdicts=PROMISED) - {"context.model_yaml_config"}:
        for part in name.split("."):
            assert f'"{part}"' in sources("handlers"), f"no handler reads {name}"


def test_launcher() -> None:
    functions = inspect.getmembers(launcher, inspect.isfunction)
    own = {name for name, one in functions if one.__module__ == launcher.__name__}
    check("ts.launcher", code={name for name in own if not name.startswith("_")})


def test_import_names() -> None:
    table = "Modules"
    assert {"ts", *ts._TARGETS} - named(table) == set(), "missing from the page"
    for name in sorted(named(table, verdicts=PROMISED)):
        assert importlib.util.find_spec(name) is not None


def a_context() -> Context:
    return Context("m", "/", None, 1, None, "1.0")


def public(thing: object) -> set[str]:
    return {name for name in dir(thing) if not name.startswith("_")}


@pytest.mark.parametrize(
    ("table", "thing", "aside"),
    [
        ("Context", a_context(), {"gpu_id"}),  # an entry of system_properties
        ("RequestProcessor", RequestProcessor, set()),
        ("context.metrics", MetricsStore, set()),
    ],
)
def test_what_handlers_call(table: str, thing: object, aside: set[str]) -> None:
    check(table, code=public(thing), without=aside)


def test_metric_objects() -> None:
    check("Metric objects", code=public(CachingMetric) | public(Metric) | {"to_dict"})


def test_utilities() -> None:
    table = "Names in ts.utils.util, ts.handler_utils.utils and ts.service"
    check(table, code=set(utils.__all__))


def test_methods_of_the_base_handler() -> None:
    # Read, not imported: it loads torch.
    tree = ast.walk(ast.parse(sources("handlers/base_handler.py")))
    methods = {one.name for one in tree if isinstance(one, ast.FunctionDef)}
    suffixes = set(re.findall(r'"(\.[a-z0-9]+)"', sources("handlers")))
    names = named("BaseHandler", verdicts=PROMISED)
    assert names - methods - suffixes == set()


def test_built_in_handlers() -> None:
    table = "Built-in handlers"
    assert {*archiver.BUILT_IN_HANDLERS, *archiver.BUILT_IN_LSP_HANDLERS} - named(table) == set()
    for name in named(table, verdicts=PROMISED):
        if re.fullmatch(r"[a-z_]+", name) and "'" not in name:
            assert importlib.util.find_spec(f"ts.torch_handler.{name}") is not None


def test_request_envelopes() -> None:
    prefix = "ts.torch_handler.request_envelope."
    found = {one.removeprefix(prefix) for one in ts._TARGETS if one.startswith(prefix)}
    check("Request envelopes", code=found - {"base"})


@lru_cache(maxsize=8)
def sources(*places: str) -> str:
    """The text of our Python files, of all rooms or of these."""
    found = [ROOT / place for place in places or ("frontend", "backend", "handlers")]
    files = [file for one in found for file in (one.rglob("*.py") if one.is_dir() else [one])]
    return "\n".join(file.read_text(encoding="utf-8") for file in sorted(files))
