"""docs/compatibility.md and tools/doctor/names.md, compared with the code.

Both ways: what the code has and they lack is a gap; what they call same, new or better
and the code does not have is a false promise. The names come from parsers, route tables, OpenAPI
documents and readers where possible, else from a search in the sources.
`marserve.tools.doctor.compatibility` reads both files, and describes their format.
"""

import argparse
import ast
import importlib.util
import inspect
import re
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import pytest
from served_models import saved_entry

import ts
from marserve.backend import manifest
from marserve.backend.context import Context, RequestProcessor
from marserve.backend.metrics import CachingMetric, Metric, MetricsStore
from marserve.frontend import cli, errors
from marserve.frontend.configuration import loading, models_key, saved_models, unread_keys
from marserve.frontend.configuration.config import Config
from marserve.frontend.configuration.model_schema import Autoscaling
from marserve.frontend.configuration.setting import camel_case
from marserve.frontend.http.router import ANY_OTHER, Route
from marserve.frontend.lifecycle import service_manager
from marserve.frontend.logs.config import configure_logging
from marserve.frontend.logs.levels import logger_levels
from marserve.frontend.rest import endpoints as rest_endpoints
from marserve.frontend.rest.api_description import describe_listener, description_routes
from marserve.frontend.rest.dashboard import dashboard_routes
from marserve.frontend.rest.endpoints import metrics_routes
from marserve.frontend.rest.inference import inference_routes
from marserve.frontend.rest.kserve import kserve_platform_routes, kserve_routes
from marserve.frontend.rest.loggers import logger_routes
from marserve.frontend.rest.management import management_routes
from marserve.frontend.rest.open_inference import repository_routes
from marserve.frontend.rest.shared_routes import shared_routes
from marserve.frontend.rest.vertex import vertex_routes
from marserve.frontend.rest.workflows import (
    workflow_inference_routes,
    workflow_management_routes,
)
from marserve.frontend.serving.registry import ModelRegistry
from marserve.frontend.settings.model_settings import resolve_settings
from marserve.frontend.telemetry.metrics import Metrics
from marserve.frontend.telemetry.metrics_config import KINDS, load_metrics_config
from marserve.frontend.workers.launchers import openmp
from marserve.handlers import utils
from marserve.handlers.performance import optimization
from marserve.handlers.torchserve_api import offline_service
from marserve.tools import launcher, llm_launcher
from marserve.tools.archiver import archiver, workflow_archiver
from marserve.tools.bench import options as bench_options
from marserve.tools.doctor import compatibility
from marserve.tools.doctor.compatibility import Entry, entries

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "compatibility.md"
VERDICTS = ("same", "new", "better", "refused", "later")
PROMISED = ("same", "new", "better")


# -- the page --------------------------------------------------------------------------------------


def test_the_doctor_reads_this_very_page():
    """Also where it is installed: then the link is a copy."""
    assert Path(compatibility.__file__).with_name(PAGE.name).resolve() == PAGE.resolve()


def named(*headings: str, verdicts: tuple[str, ...] = VERDICTS) -> set[str]:
    """The names under these headings: of whole sections, of a `section` and a `section: group`."""
    found = [entry for entry in entries() if under(entry, headings)]
    assert found, f"nothing stands under {headings}"
    return {name for item in found if item.verdict in verdicts for name in item.names}


def under(entry: Entry, headings: tuple[str, ...]) -> bool:
    return bool({entry.section, f"{entry.section}: {entry.group}"} & set(headings))


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
    on_page = named(*headings)
    assert {name for name in code if not stands_on(on_page, name)} == set(), "missing from the page"
    promised = named(*headings, verdicts=PROMISED) - (without or set())
    assert promised - code - (more or set()) == set(), "promised, but not in the code"


def stands_on(page: set[str], name: str) -> bool:
    return name in page or any(fnmatchcase(name, item) for item in page if "*" in item)


def check_elsewhere(*pages: str, code: set[str]) -> None:
    """What the code has stands on other pages of docs/."""
    text = "\n".join((PAGE.parent / page).read_text(encoding="utf-8") for page in pages)
    assert code, "the code is not asked rightly: it has nothing"
    assert {item for item in code if not re.search(rf"{re.escape(item)}(?![\w-])", text)} == set()


def test_every_entry_has_names_a_verdict_and_a_reason_where_something_differs():
    assert len(entries()) > 100
    assert [entry for entry in entries() if not entry.text or entry.verdict not in VERDICTS] == []
    # What is to come needs no reason; in a list the reasons stand in parentheses.
    assert [entry for entry in entries() if not entry.note and entry.verdict != "later"] == []
    no_effect = [entry for entry in entries() if entry.verdict == "refused" and entry.is_list]
    assert no_effect
    assert [item for item in no_effect if "(" not in item.note] == []


def test_no_name_has_two_verdicts_in_one_group():
    seen = {}
    for entry in entries():
        for name in entry.names:
            earlier = seen.setdefault((entry.section, entry.group, name), entry)
            assert earlier == entry, f"{name} stands twice in {entry.section} {entry.group}"


def test_a_star_stands_only_in_what_is_not_promised():
    starred = [entry for entry in entries() for name in entry.names if "_*" in name]
    assert [item for item in starred if item.verdict in PROMISED] == []


@pytest.mark.parametrize(
    "page", ["README.md", *(f"docs/{item.name}" for item in sorted(PAGE.parent.glob("*.md")))]
)
def test_links_of_a_page_lead_somewhere(page):
    path = ROOT / page
    for file, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", without_code(path)):
        target = path.parent / file if file else path
        assert target.exists(), f"{file} is not there"
        headings = re.findall(r"^#+ (.+)$", without_code(target), re.MULTILINE) if anchor else []
        anchors = {
            re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings
        }
        assert not anchor or anchor in anchors, f"{file}#{anchor}"


def without_code(page: Path) -> str:
    """A page without its blocks of code, in which brackets mean something else."""
    return re.sub(r"(?ms)^```.*?^```$", "", page.read_text(encoding="utf-8"))


# -- configuration ---------------------------------------------------------------------------------

KEYS = "Configuration keys"


def supported() -> set[str]:
    return set(loading.KEYS)


def test_configuration_keys():
    known = supported() | unread_keys.WITHOUT_EFFECT.keys() | unread_keys.RECORDS
    check(KEYS, code=set(known))
    names = {item for item in named(KEYS) if "*" not in item}
    assert names - known == set(), "names as an unknown key"
    for stars in named(KEYS) - names:
        assert any(fnmatchcase(item, stars) for item in known), f"{stars} is no key"


def test_the_verdicts_of_keys_are_those_of_the_code():
    promised, later = named(KEYS, verdicts=PROMISED), named(KEYS, verdicts=("later",))
    assert promised - supported() - unread_keys.RECORDS == set()
    assert {item for item in supported() if stands_on(later, item)} == set()
    assert unread_keys.WITHOUT_EFFECT.keys() - named(KEYS, verdicts=("refused",)) == set()


def test_members_of_models_and_of_snapshots():
    of_models = {*models_key.KINDS, *models_key.BYSTANDERS}
    chosen = {row.attribute: None for row in saved_models.SAVED}
    saved = replace(
        saved_entry(**chosen, is_automatic=True),
        handler="h",
        parallel_level=2,
        set_by_requests=("batchSize",),
        batch_costs=((1.0, 0.01, 5),),
    )
    snapshot = set(re.findall(r'"(\w+)":', saved_models.snapshot_json("name", 0, [saved])))
    code = set(map(camel_case, of_models)) | (snapshot - {"models", "m", "1.0"})
    files = {"load_models", "--models"}
    check("models and snapshots", code=set(code), without=files)


def test_environment_variables():
    read = set(re.findall(r'environ(?:ment)?(?:\.get\(|\[)"([A-Z][A-Z0-9_]+)"', sources()))
    read |= set(re.findall(r'"([A-Z][A-Z0-9_]+)" (?:not )?in os\.environ', sources()))
    given = set(re.findall(r'"((?:TS|OMP|LOG|LOCAL)_?[A-Z_]+)": ', sources()))
    by_rule = {loading._variable_name(key) for key in supported()}
    built = {f"TS_REQUEST_SEQUENCE_{part}" for part in ("ID", "START", "END")}
    assert all(name.lower() in vars(a_context()).values() for name in built)
    # Read by Python's tempfile; set by torch's launcher of ranks; read by botocore.
    others = {"TMPDIR", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"}
    others |= {f"AWS_{name}" for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN")}
    others |= {"AWS_DEFAULT_REGION", *openmp.VARIABLES}
    others |= {service_manager.SOCKET_VARIABLE, service_manager.WATCHDOG_VARIABLE}
    others |= {service_manager.WATCHDOG_PID_VARIABLE}
    section = "Environment variables"
    check(section, code=read, more=given | by_rule | built | others)
    irregular = {key for key in supported() if loading._variable_name(key) != f"TS_{key.upper()}"}
    assert {loading._variable_name(key) for key in irregular} - named(section) == set()


def test_keys_that_no_variable_overrides():
    text = PAGE.read_text(encoding="utf-8").partition("## Environment variables")[2]
    sentence = text.partition("but")[2].partition(":")[0]
    names = set(re.findall(r"`(\w+)`", sentence))
    # What is only recorded, or has a variable of its own, is no exception to the rule.
    assert names == loading._WITHOUT_ENV_NAME - {"tsConfigFile", "ts_open_inference_protocol"}


# -- command lines ---------------------------------------------------------------------------------


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    visible = (action for action in parser._actions if action.help is not argparse.SUPPRESS)
    return {option for action in visible for option in action.option_strings}


@pytest.mark.parametrize(
    ("group", "build"),
    [
        ("torchserve", cli.build_parser),
        ("torch-model-archiver", archiver.build_parser),
        (
            "torch-workflow-archiver",
            workflow_archiver.ArgParser.workflow_archiver_args_parser,
        ),
        ("ts.llm_launcher", llm_launcher.build_parser),
    ],
)
def test_options(group, build):
    options, heading = options_of(build()), f"Command line: {group}"
    without = {item for item in named(heading) if not item.startswith("-")}
    check(heading, code=options, without=without)


def test_options_of_the_bench_stand_on_its_page():
    options = options_of(bench_options.build_parser()) - {"-h", "--help"}
    check_elsewhere("bench.md", "bench-reports.md", code=options)


# -- endpoints -------------------------------------------------------------------------------------

METHOD_AND_PATH = re.compile(r"([A-Z]+) (/\S*)")


def endpoints(*verdicts: str) -> set[tuple[str, str]]:
    found = map(METHOD_AND_PATH.fullmatch, named("Endpoints", verdicts=verdicts or VERDICTS))
    return {(item[1], item[2]) for item in found if item}


def documented() -> set[tuple[str, str]]:
    """Method and path of all that the listeners' own descriptions offer."""
    apis = ["Inference", "Management", "Metrics"]
    document = describe_listener(apis, open_inference=True)
    described = {(method, path) for path, of in document["paths"].items() for method in of}
    return {(method.upper(), path) for method, path in described}


def routes() -> set[str]:
    """First segments of all paths that a door knows."""
    registry, anything = ModelRegistry(), cast("Any", object())
    tables = [
        inference_routes(registry, 1),
        kserve_routes(registry, 1, open_inference=True),
        management_routes(anything, tokens=anything, max_request_bytes=1),
        workflow_management_routes(anything, 1),
        workflow_inference_routes(anything, 1, Route(anything)),
        logger_routes(),
        dashboard_routes(anything, anything, registry, 1),
        metrics_routes(Metrics(), ModelRegistry()),
        description_routes("Inference", open_inference=True),
    ]
    return {first for table in tables for first in table}


def first_segment(path: str) -> str:
    first = path.split("/")[1]
    return ANY_OTHER if first.startswith("{") else first


def test_every_table_of_routes_is_looked_at():
    makers = {name for name in vars(rest_endpoints) if name.endswith("_routes")}
    known = {
        inference_routes,
        kserve_routes,
        management_routes,
        workflow_inference_routes,
        workflow_management_routes,
        logger_routes,
        dashboard_routes,
        metrics_routes,
        description_routes,
        repository_routes,  # a part of what is below /v2
        shared_routes,  # joins two of them
        vertex_routes,  # paths that Vertex makes up: docs/platforms/vertex.md
        kserve_platform_routes,  # what KServe's own servers answer: docs/platforms/kserve.md
    }
    assert makers == {item.__name__ for item in known}


def test_routes():
    on_page = {first_segment(path) for _, path in endpoints()}
    assert routes() - on_page == set()
    promised = {first_segment(path) for _, path in endpoints(*PROMISED)}
    assert promised - routes() == set()


def test_endpoints():
    assert documented() - endpoints() == set(), "missing from the page"
    paths = {path for _, path in documented()}
    promised = {
        endpoint
        for endpoint in endpoints(*PROMISED)
        if endpoint[0] != "OPTIONS" or endpoint[1] not in paths
    }
    assert promised - documented() == set(), "promised, but not in the code"


def test_query_parameters():
    apis = ["Inference", "Management", "Metrics"]
    document = describe_listener(apis, open_inference=True)
    operations = [operation for of in document["paths"].values() for operation in of.values()]
    parameters = [item for operation in operations for item in operation["parameters"]]
    check(
        "Parameters",
        code={parameter["name"] for parameter in parameters if parameter["in"] == "query"},
    )


def test_members_of_a_description():
    document = describe_listener(["Management"])
    schemas = document["components"]["schemas"]
    of_model = schemas["Model"]["properties"]
    parts = (of_model, schemas["Worker"]["properties"], of_model["jobQueueStatus"]["properties"])
    check("Descriptions of models", code={name for part in parts for name in part})
    below = [schemas[name]["properties"] for name in ("Batching", "BatchCosts", "BatchCost")]
    check_elsewhere("batching.md", code={name for part in below for name in part})
    check_elsewhere("batching.md", code=set(schemas["PastBatch"]["properties"]))
    for name in ("WorkerTorch", "WorkerCompiled"):
        check_elsewhere("performance-options.md", code=set(schemas[name]["properties"]))


def test_headers_of_answers():
    names = named("Requests and answers: answers", verdicts=PROMISED)
    headers = {name.partition(":")[0].lower() for name in names}
    written = sources().lower()
    assert {name for name in headers if name not in written} == set()


def test_errors():
    classes = [var for var in vars(errors).values() if isinstance(var, type)]
    own = [item for item in classes if issubclass(item, errors.ServeError)]
    code = {f"{item.status} {item.wire_type}" for item in own}
    # With a status of its own: a body that stalls, and what workers report.
    more = {"408 BadRequestException", "507 InternalServerException", "501"}
    check("Requests and answers: errors", code=code, more=more)


# -- model-config.yaml, metrics.yaml, manifest -----------------------------------------------------


class Recorder(dict[str, Any]):
    """A mapping that remembers what it was asked for."""

    def __init__(self, **members: Any) -> None:
        super().__init__(members)
        self.asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)


def test_model_config_yaml(tmp_path):
    torchrun = Recorder()
    model_yaml = Recorder(torchrun=torchrun)
    settings = Config(model_store=tmp_path)
    resolve_settings({}, model_yaml, {}, settings, gpus=0, default_workers=0)
    check("model-config.yaml: ", code=set(map(camel_case, model_yaml.asked)))
    check("model-config.yaml: under torchrun", code=torchrun.asked)


def test_thresholds_of_autoscale(tmp_path):
    def autoscaling(**thresholds):
        found = {"autoscale": thresholds}
        config = Config(model_store=tmp_path)
        return resolve_settings({}, found, {}, config, gpus=0, default_workers=0).autoscale

    names = named("model-config.yaml: under autoscale")
    assert len(names) == len(vars(Autoscaling()))
    assert {name: autoscaling(**{name: 7}) == Autoscaling() for name in names} == dict.fromkeys(
        names, False
    )
    assert None not in {autoscaling(**{name: 7}) for name in names}


def test_manifest():
    check("Archives: manifest", code={*manifest._MODEL_KEYS.values(), *manifest._TOP_KEYS.values()})


def test_metrics_yaml():
    code = inspect.getsource(inspect.getmodule(load_metrics_config) or ts)
    members = set(re.findall(r'entry\.get\("(\w+)"', code))
    sections = set(re.findall(r'_section\(sections, "(\w+)"', code))
    check("Metrics: metrics.yaml", code={*KINDS, *members, *sections})


# -- metrics and logs ------------------------------------------------------------------------------


def test_metrics_of_the_server():
    own = set(
        re.findall(
            r'"(marserve_\w+)"',
            sources(
                "frontend/telemetry", "frontend/serving/monitoring.py", "frontend/rest/endpoints.py"
            ),
        )
    )
    check("Metrics: of the server", code=own | load_metrics_config().ts.keys())


def test_metrics_of_handlers():
    stages = {f"ts_handler_{stage}" for stage in ("preprocess", "inference", "postprocess")}
    assert 'f"ts_handler_{' in sources("handlers/timer.py")
    built_in = set(load_metrics_config().model)
    check("Metrics: of handlers", code=built_in | stages, without={"[METRICS]"})


def test_log_files(tmp_path):
    with configure_logging(tmp_path / "logs", tmp_path / "metrics"):
        code = {path.name for path in tmp_path.rglob("*.log")}
    check("Logs: files", code=code)


def test_loggers():
    check("Logs: loggers", code={name for name in logger_levels() if "." not in name})


def test_log_lines_are_written_somewhere():
    for line in named("Logs: lines", verdicts=PROMISED):
        for piece in filter(None, map(str.strip, re.split(r"<[^>]*>", line))):
            assert piece in sources(), f"nothing writes {line!r}"
    for line in named("Logs: lines", verdicts=("refused",)):
        assert line not in sources(), f"{line!r} is written after all"


# -- handlers --------------------------------------------------------------------------------------


def test_what_handlers_read_of_the_yaml():
    for name in named("model-config.yaml: read by handlers", verdicts=PROMISED):
        for part in name.split("."):
            assert f'"{part}"' in sources("handlers"), f"no handler reads {name}"
    members = {*optimization._READERS, *optimization._GOAL_READERS}
    check_elsewhere("performance-options.md", code=members)


def test_launcher():
    functions = inspect.getmembers(launcher, inspect.isfunction)
    own = {name for name, item in functions if item.__module__ == launcher.__name__}
    check("Command line: ts.launcher", code={name for name in own if not name.startswith("_")})


def test_import_names():
    heading = "Import names: "
    assert {"ts", *ts._TARGETS} - named(heading) == set(), "missing from the page"
    for name in sorted(named(heading, verdicts=PROMISED)):
        assert importlib.util.find_spec(name) is not None
    for name in sorted(named(heading, verdicts=("refused",))):
        with pytest.raises(ImportError):
            importlib.import_module(name)


def a_context() -> Context:
    return Context("m", "/", None, 1, None, "1.0")


def public(thing: object) -> set[str]:
    return {name for name in dir(thing) if not name.startswith("_")}


@pytest.mark.parametrize(
    ("group", "thing"),
    [
        ("Context", a_context()),
        ("RequestProcessor", RequestProcessor),
        ("context.metrics", MetricsStore),
    ],
)
def test_what_handlers_call(group, thing):
    check(f"Handlers: {group}", code=public(thing))


def test_metric_objects():
    check("Handlers: metrics", code=public(CachingMetric) | public(Metric) | {"to_dict"})


def test_utilities():
    of_service = {"PREDICTION_METRIC", "Service", "create_predict_response", "emit_metrics"}
    assert of_service <= set(dir(offline_service))
    check("Import names: helpers", code=set(utils.__all__) | of_service)


def test_methods_of_the_base_handler():
    # Read, not imported: it loads torch.
    source = sources("handlers/base_handler.py")
    tree = list(ast.walk(ast.parse(source + sources("handlers/model_files.py"))))
    flags = set(re.findall(r"\b([A-Z]\w+_AVAILABLE)\b", source))
    methods = {item.name for item in tree if isinstance(item, ast.FunctionDef)}
    methods |= {item.id for item in tree if isinstance(item, ast.Name)}  # assigned in the class
    suffixes = set(re.findall(r'"(\.[a-z0-9]+)"', sources("handlers")))
    names = named("Handlers: BaseHandler", verdicts=PROMISED)
    assert flags - names == set(), "missing from the page"
    assert names - methods - suffixes - flags == set()


def test_built_in_handlers():
    heading = "Handlers: shipped"
    assert {*archiver.BUILT_IN_HANDLERS, *archiver.BUILT_IN_LSP_HANDLERS} - named(heading) == set()
    for name in named(heading, verdicts=PROMISED):
        if re.fullmatch(r"[a-z_]+", name) and "'" not in name:
            assert importlib.util.find_spec(f"ts.torch_handler.{name}") is not None


def test_request_envelopes():
    prefix = "ts.torch_handler.request_envelope."
    found = {target.removeprefix(prefix) for target in ts._TARGETS if target.startswith(prefix)}
    check("Handlers: envelopes", code=found - {"base"})


@lru_cache(maxsize=8)
def sources(*places: str) -> str:
    """The text of our Python files, of all rooms or of these."""
    found = [ROOT / place for place in places or ("frontend", "backend", "handlers", "tools")]
    files = [file for item in found for file in (item.rglob("*.py") if item.is_dir() else [item])]
    return "\n".join(file.read_text(encoding="utf-8") for file in sorted(files))
