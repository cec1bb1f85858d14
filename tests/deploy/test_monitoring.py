"""Dashboards and rules of deploy/monitoring, beside a server and a Prometheus that run.

A metric that was renamed leaves a panel empty, and an alert silent, without a word of anybody.
"""

import json
import re
import subprocess
import time
from itertools import combinations
from pathlib import Path
from typing import Any

import catalog_file
import pytest
import requests
import yaml
from deploy.monitoring_files import (
    DASHBOARDS,
    DEPLOY,
    MONITORING,
    RULES,
    expressions,
    metric_names,
    panels,
    rules,
)
from programs import program
from servers import PATIENCE, free_ports, make_archive, wait_for

PROMETHEUS = MONITORING / "prometheus"
#: Of panels without seconds.
UNITS = {"bytes", "ms", "ops", "percent", "percentunit", "reqps", "short"}
#: Of Prometheus itself.
OTHERS = {"up"}


def asked(expression: str) -> str:
    """An expression as Grafana sends it with everything selected."""
    values = {"$__rate_interval": "5s", "$instance": ".+", "$model": "lab", "$version": ".+"}
    for name, value in values.items():
        expression = expression.replace(name, value)
    assert "$" not in expression
    return expression


# What they say


@pytest.mark.parametrize("board", DASHBOARDS, ids=lambda path: path.stem)
def test_panels_of_a_dashboard_stand_beside_each_other(board):
    document = json.loads(board.read_text())
    numbers = [panel["id"] for panel in document["panels"]]
    assert len(numbers) == len(set(numbers))
    boxes = [panel["gridPos"] for panel in document["panels"]]
    assert all(box["x"] >= 0 and box["x"] + box["w"] <= 24 for box in boxes)
    for one, other in combinations(boxes, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or below, (one, other)


@pytest.mark.parametrize("board", DASHBOARDS, ids=lambda path: path.stem)
def test_variables_of_a_dashboard_are_defined(board):
    document = json.loads(board.read_text())
    defined = {variable["name"] for variable in document["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(document)))
    assert {name for name in used if not name.startswith("__")} == defined
    for panel in panels(board):
        sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
        assert {source["uid"] for source in sources} == {"${datasource}"}


@pytest.mark.parametrize("board", DASHBOARDS, ids=lambda path: path.stem)
def test_panels_say_what_they_show_and_in_which_unit(board):
    for panel in panels(board):
        assert panel["title"]
        defaults = panel.get("fieldConfig", {}).get("defaults", panel["options"].get("yAxis"))
        seconds = any("_seconds" in target["expr"] for target in panel["targets"])
        assert defaults["unit"] in ({"s", "percentunit"} if seconds else UNITS), panel["title"]
        references = [target["refId"] for target in panel["targets"]]
        assert references == sorted(set(references))


def test_dots_of_panels_are_of_histograms_with_exemplars_and_lead_to_the_request():
    with_dots = [
        target["expr"]
        for board in DASHBOARDS
        for panel in panels(board)
        for target in panel["targets"]
        if target.get("exemplar")
    ]
    named = [name for text in with_dots for name in metric_names(text)]
    assert set(named) == {"marserve_request_seconds_bucket", "marserve_queue_seconds_bucket"}
    sources = MONITORING / "grafana" / "provisioning" / "datasources" / "prometheus.yml"
    (source,) = yaml.safe_load(sources.read_text())["datasources"]
    (link,) = source["jsonData"]["exemplarTraceIdDestinations"]
    assert link["name"] == "request_id"
    # Grafana replaces $NAME by an environment variable, and $$ by $.
    assert link["url"].endswith(":8081/dashboard#/requests/$${__value.raw}")


def test_each_alert_leads_to_its_paragraph():
    page = (DEPLOY.parent / "docs" / "monitoring.md").read_text()
    paragraphs = set(re.findall(r"^### `(\w+)`$", page, re.MULTILINE))
    alerts = {rule["alert"]: rule["annotations"] for rule in rules() if "alert" in rule}
    assert paragraphs == alerts.keys()
    for name, annotations in alerts.items():
        assert annotations["runbook_url"] == f"docs/monitoring.md#{name.lower()}"


def test_dashboards_have_titles_and_names_of_their_own():
    documents = [json.loads(board.read_text()) for board in DASHBOARDS]
    for key in ("uid", "title"):
        assert len({document[key] for document in documents}) == len(documents) == 2


def test_expressions_of_dashboards_are_promql(tmp_path):
    every = {asked(each) for board in DASHBOARDS for each in expressions(board)}
    file = tmp_path / "expressions.yml"
    recorded = [{"record": f"e:{n}", "expr": text} for n, text in enumerate(sorted(every))]
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboards", "rules": recorded}]}))
    promtool("check", "rules", file)


def test_prometheus_reads_its_configuration_and_the_rules():
    assert yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["rule_files"] == [RULES.name]
    promtool("check", "config", PROMETHEUS / "prometheus.yml")


def test_alerts_fire_when_all_goes_wrong_and_only_then():
    cases = Path(__file__).with_name("marserve.rules.test.yml")
    tested = set(re.findall(r'alertname="(\w+)"', cases.read_text()))
    assert tested == {rule["alert"] for rule in rules() if "alert" in rule}
    promtool("test", "rules", cases)


def promtool(*arguments: str | Path) -> None:
    done = subprocess.run(
        [program("promtool"), *arguments], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


# What is there


class Prometheus:
    """One that reads a server's metrics several times a second."""

    def __init__(self, url: str) -> None:
        self._url = url

    def ask(self, expression: str) -> list[Any]:
        """The samples that an expression gives now."""
        samples: list[Any] = self._get("query", query=expression)["result"]
        return samples

    def exemplars(self, expression: str) -> list[Any]:
        """The exemplars of the last minute, of the series that an expression is about."""
        now = time.time()
        found = self._get("query_exemplars", query=expression, start=now - 60, end=now + 60)
        return [exemplar for series in found for exemplar in series["exemplars"]]

    def _get(self, what: str, **parameters: Any) -> Any:
        url = f"{self._url}/api/v1/{what}"
        answer = requests.get(url, params=parameters, timeout=PATIENCE).json()
        assert answer["status"] == "success", (parameters, answer)
        return answer["data"]


@pytest.fixture(scope="module")
def served(start_server, handlers, tmp_path_factory):
    """A server that measures all it can, and keeps to a catalog."""
    catalog = tmp_path_factory.mktemp("catalog") / "catalog.json"
    archive = make_archive(catalog.parent, handlers / "lab.py", "lab")
    catalog_file.write(catalog, {"lab": {"1.0": {"url": archive.as_uri(), "minWorkers": 1}}})
    properties = {
        "disable_system_metrics": "false",
        "metric_time_interval": "1",
        "model_catalog": str(catalog),
    }
    with start_server(**properties) as server:
        wait_for(lambda: server.inference("GET", "/ready?model=lab").status_code == 200)
        yield server


@pytest.fixture(scope="module")
def prometheus(served, tmp_path_factory):
    """Prometheus with the files of deploy/, the target and the intervals excepted."""
    executable = program("prometheus")
    folder = tmp_path_factory.mktemp("prometheus")
    (port,) = free_ports(1)
    text = (PROMETHEUS / "prometheus.yml").read_text()
    text = text.replace("15s", "200ms").replace(
        "marserve:8082", f"127.0.0.1:{served.ports['metrics']}"
    )
    (folder / "prometheus.yml").write_text(text)
    (folder / RULES.name).write_text(RULES.read_text())
    command = [
        executable,
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--enable-feature=exemplar-storage",
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
    try:
        running = Prometheus(f"http://127.0.0.1:{port}")

        def is_up():
            assert process.poll() is None, (folder / "log").read_text()
            try:
                return bool(running.ask("up == 1"))
            except requests.RequestException:  # it still reads its files
                return False

        wait_for(is_up, what=lambda: (folder / "log").read_text())
        yield running
    finally:
        process.terminate()
        process.wait(PATIENCE)


@pytest.mark.integration
def test_every_metric_that_is_asked_for_is_one_that_a_server_exports(served):
    page = requests.get(f"http://127.0.0.1:{served.ports['metrics']}/metrics", timeout=PATIENCE)
    exported = set()
    for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", page.text, re.MULTILINE):
        ends = ("_bucket", "_count", "_sum") if kind == "histogram" else ("",)
        exported |= {name + end for end in ends}
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    scalers = [DEPLOY / "helm" / "marserve" / "templates" / "autoscaling.yaml"]
    scalers += [MONITORING / "prometheus-adapter.yaml"]
    by_scalers = {
        name for file in scalers for name in re.findall(r"\bmarserve_\w+", file.read_text())
    }
    assert by_scalers == {"marserve_queued_requests", "marserve_open_requests"} <= exported
    by_rules = {name for rule in rules() for name in metric_names(rule["expr"])}
    by_boards = {
        name for board in DASHBOARDS for text in expressions(board) for name in metric_names(text)
    }
    assert {"ts_inference_requests_total", "marserve_queue_seconds_bucket"} <= by_boards
    assert by_rules - exported - recorded - OTHERS == set()
    assert by_boards - exported - OTHERS == set()


@pytest.mark.integration
def test_no_panel_is_empty_whose_metrics_the_server_has(served, prometheus):
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline:
        assert served.ask("lab").status_code == 200
        assert served.ask("lab", do="raise").status_code == 503
    names = prometheus.ask('group by (__name__) ({job="marserve"})')
    present = {sample["metric"]["__name__"] for sample in names}
    every = {text for board in DASHBOARDS for text in expressions(board)}
    recorded = {rule["expr"].replace("5m", "5s") for rule in rules() if "record" in rule}
    expected = [text for text in every | recorded if metric_names(text) <= present]
    assert len(expected) > len(every) / 2
    for text in expected:
        wait_for(lambda text=text: prometheus.ask(asked(text)), 5, what=text)
    for rule in rules():
        if "record" in rule:
            wait_for(lambda name=rule["record"]: prometheus.ask(name), what=rule["record"])
    for text in every | {rule["expr"] for rule in rules()}:
        prometheus.ask(asked(text))  # it evaluates, even where there is nothing


@pytest.mark.integration
def test_prometheus_has_a_request_as_exemplar(served, prometheus):
    answer = served.ask("lab")
    assert answer.status_code == 200
    labels = {"request_id": answer.headers["x-request-id"]}
    for text in {
        target["expr"]
        for board in DASHBOARDS
        for panel in panels(board)
        for target in panel["targets"]
        if target.get("exemplar")
    }:
        query = asked(text)
        wait_for(
            lambda query=query: labels in [each["labels"] for each in prometheus.exemplars(query)],
            what=text,
        )
