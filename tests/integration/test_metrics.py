"""What the metrics listener and the metrics logs tell."""

import re

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

pytestmark = pytest.mark.integration

COUNTERS = [
    "Requests2XX",
    "Requests4XX",
    "Requests5XX",
    "ts_inference_requests_total",
    "ts_inference_latency_microseconds",
    "ts_queue_latency_microseconds",
]
GAUGES = [
    "QueueTime",
    "WorkerThreadTime",
    "WorkerLoadTime",
]
SYSTEM = [
    "CPUUtilization",
    "MemoryUtilization",
    "DiskUtilization",
    "MemoryUsed",
    "MemoryAvailable",
    "DiskUsage",
    "DiskAvailable",
]

CUSTOM = """
from ts.metrics.dimension import Dimension

class Counting:
    def initialize(self, context):
        pass

    def handle(self, data, context):
        metrics = context.metrics
        metrics.add_counter("Seen", len(data))
        metrics.add_time("Thinking", 12.5, unit="ms", dimensions=[Dimension("Stage", "late")])
        metrics.add_size("Heap", 3, unit="MB")
        metrics.add_counter("bad name with spaces!", 1)
        print("[METRICS]Printed.Count:2|#ModelName:custom,Level:Model|#type:COUNTER|#hostname:x,1")
        print("INFO > [METRICS]Printed.Count:3|#ModelName:custom,Level:Model|#type:x|#hostname:x,1")
        print("[METRICS]rubbish")
        print("not [METRICS] at all")
        return ["fine"] * len(data)
"""


@pytest.fixture(scope="module")
def server(start_server, handlers):
    with start_server(disable_system_metrics="false", model_metrics_auto_detect="true") as server:
        server.install(handlers / "lab.py", "lab")
        server.install(CUSTOM, "custom")
        yield server


def page(server, query=""):
    return server._request("metrics", "GET", f"/metrics{query}", {})


def value(server, name, **labels):
    """The sum over the series of a metric that have these labels."""
    wanted = [f'{key}="{text}"' for key, text in labels.items()]
    samples = server.metrics(name)
    return sum(
        sample for series, sample in samples.items() if all(each in series for each in wanted)
    )


def test_the_page(server):
    answer = page(server)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    for line in answer.text.splitlines():
        assert re.fullmatch(r"# (HELP|TYPE) \w+ .+|\w+\{.*\} (-?[\d.e+-]+|\+Inf)", line), line


def test_a_client_that_prefers_openmetrics_gets_the_same_samples(server):
    assert server.ask("lab").status_code == 200
    preferred = "application/openmetrics-text;version=1.0.0;q=0.6,text/plain;q=0.5,*/*;q=0.1"
    answer = server._request("metrics", "GET", "/metrics", {"headers": {"Accept": preferred}})
    expected = "application/openmetrics-text; version=1.0.0; charset=utf-8"
    assert answer.headers["content-type"] == expected
    families = {each.name: each for each in text_string_to_metric_families(answer.text)}
    assert families["Requests2XX"].type == "unknown"
    assert families["ts_inference_requests"].type == "counter"
    names = {sample.name for family in families.values() for sample in family.samples}
    assert names == set(re.findall(r"^(\w+)\{", page(server).text, re.MULTILINE))


def test_the_names_and_types_of_torchserve(server, wait_for):
    assert server.ask("lab", id=1).status_code == 200
    wait_for(lambda: "DiskAvailable{" in page(server).text)
    text = page(server).text
    for name in COUNTERS:
        assert f"# TYPE {name} counter\n" in text
    for name in GAUGES + SYSTEM:
        assert f"# TYPE {name} gauge\n" in text
    assert "# HELP Requests2XX Torchserve prometheus counter metric with unit: Count\n" in text
    assert "_created" not in text
    assert re.search(r'^Requests2XX\{Level="Host",Hostname="[^"]+",\} \d', text, re.MULTILINE)
    assert re.search(
        r'^ts_inference_requests_total\{model_name="lab",model_version="default",hostname="',
        text,
        re.MULTILINE,
    )
    assert re.search(
        r'^WorkerLoadTime\{WorkerName="W-9000-lab_1.0",Level="Host",Hostname="', text, re.MULTILINE
    )


def test_answers_are_counted_by_class(server):
    def counts():
        return [value(server, f"Requests{number}XX") for number in (2, 4, 5)]

    before = counts()
    server.ask("lab", id=1)
    server.predict("nobody")
    server.ask("lab", do="raise")
    after = counts()
    # The page itself is an answer too.
    assert after[1] - before[1] == 1
    assert after[2] - before[2] == 1
    assert after[0] - before[0] >= 2


def test_requests_are_counted_by_the_version_in_their_path(server):
    def counts():
        name = "ts_inference_requests_total"
        return [value(server, name, model_version=item) for item in ("default", "1.0")]

    before = counts()
    server.ask("lab", id=1)
    server.ask("lab/1.0", id=1)
    server.ask("lab/1.0", id=1)
    after = counts()
    assert [after[0] - before[0], after[1] - before[1]] == [1, 2]


def test_times_add_up(server):
    before = value(server, "ts_inference_latency_microseconds", model_name="lab")
    answer = server.ask("lab", id=1)
    spent = value(server, "ts_inference_latency_microseconds", model_name="lab") - before
    assert 0 < spent <= answer.elapsed.total_seconds() * 1e6


def test_only_the_names_asked_for(server):
    text = page(server, "?name[]=Requests2XX&name[]=QueueTime").text
    assert set(re.findall(r"^(\w+)\{", text, re.MULTILINE)) == {"Requests2XX", "QueueTime"}
    assert page(server, "?name[]=nothing").text == ""


@pytest.mark.parametrize("path", ["/", "/metric", "/ping", "/models"])
def test_there_is_nothing_else(server, path):
    assert server._request("metrics", "GET", path, {}).status_code in (404, 405)


def test_what_a_handler_reports(server):
    before = value(server, "Seen", ModelName="custom")
    assert server.predict("custom").text == "fine"
    assert value(server, "Seen", ModelName="custom", Level="Model") == before + 1
    assert value(server, "Thinking", ModelName="custom", Stage="late") == 12.5
    assert value(server, "Heap", ModelName="custom") == 3
    assert value(server, "PredictionTime", ModelName="custom") >= 0
    text = page(server).text
    assert "# TYPE Seen counter\n" in text
    assert "# TYPE Thinking gauge\n" in text


def test_a_name_that_prometheus_cannot_carry_does_not_spoil_the_page(server):
    assert server.predict("custom").text == "fine"
    assert "bad name" not in page(server).text
    server.wait_logged("ts_log.log", "bad name with spaces!")


def test_what_a_handler_prints_is_a_metric_and_no_log(server, wait_for):
    server.predict("custom")
    # What is printed is read beside the answers, so that the last lines may still be missing.
    each = 2 + 3
    answered = value(server, "Seen", ModelName="custom")
    wait_for(lambda: value(server, "Printed", ModelName="custom", Level="Model") == each * answered)
    server.wait_logged("ts_log.log", 'Failed to parse metrics line: "[METRICS]rubbish".')
    server.wait_logged("model_log.log", "not [METRICS] at all")
    assert "Printed" not in server.log("model_log.log")
    server.wait_logged("model_metrics.log", "Printed.Count:3.0|#ModelName:custom,Level:Model|#host")


def test_the_metrics_logs(server):
    assert server.predict("custom").text == "fine"
    model_line = (
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d,\d{3} - Thinking\.Milliseconds:12\.5"
        r"\|#Stage:late,ModelName:custom,Level:Model"
        r"\|#hostname:[^,]+,requestID:[0-9a-f-]{36},timestamp:\d+"
    )
    server.wait_logged("model_metrics.log", "Thinking")
    server.wait_logged("ts_metrics.log", "Requests2XX")
    lines = [line for line in server.log("model_metrics.log").splitlines() if "Thinking" in line]
    assert all(re.fullmatch(model_line, line) for line in lines), lines
    (line, *_) = [
        line for line in server.log("ts_metrics.log").splitlines() if "Requests2XX" in line
    ]
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d,\d{3} - Requests2XX\.Count:\d+\.0\|#Level:Host"
        r"\|#hostname:[^,]+,timestamp:\d+",
        line,
    )


def test_the_lines_of_an_answer_are_written_together_and_once(server, wait_for):
    def written(name):
        lines = server.log("ts_metrics.log" if name[:2] != "Se" else "model_metrics.log")
        return sum(float(item) for item in re.findall(rf" - {name}\.\w+:([\d.E-]+)\|", lines))

    def totals(ask):
        """The sums when the last lines about an answer are there, and so all others."""
        refused = written("Requests4XX")
        answer = ask()
        assert answer.text == "fine"
        server.wait_logged("model_metrics.log", answer.headers["x-request-id"])
        assert server.predict("nobody").status_code == 404
        wait_for(lambda: written("Requests4XX") > refused)
        return [written(name) for name in names]

    names = ["Requests2XX", "ts_inference_requests_total", "Seen"]
    names += ["ts_inference_latency_microseconds", "ts_queue_latency_microseconds"]
    for ask in (
        lambda: server.predict("custom"),
        # In two pieces: not the shortest way through the server.
        lambda: server.predict("custom", data=iter([b"a", b"b"])),
    ):
        before, after = totals(ask), totals(ask)
        assert [new - old for new, old in zip(after, before, strict=True)][:3] == [1, 1, 1]
        assert all(new > old for new, old in zip(after, before, strict=True))


def test_failures_have_counters(server, handlers):
    server.install(handlers / "lab.py", "failing")
    server.ask("failing", do="raise")
    server.ask("failing", do="os._exit")
    server.ask("failing", id=1)
    # Whoever takes its worker along is run once more, by itself, and then it is known.
    assert value(server, "marserve_failed_batches_total", model_name="failing") == 3
    assert value(server, "marserve_retried_requests_total", model_name="failing") == 1
    assert value(server, "marserve_worker_failures_total", model_name="failing") == 2
    assert server.management("DELETE", "/models/failing").status_code == 200
    assert "failing" not in page(server).text


INVALID = """
from ts.utils.util import PredictionException

def handle(data, context):
    seen = context.metrics
    seen.add_counter("Rows", len(data or []))
    for index, row in enumerate(data or []):
        body = bytes(row["body"])
        if body != b"good":
            seen.add_counter("Invalid", 1, index)
            raise PredictionException("no", 422) if body == b"refused" else ValueError("no")
    return ["fine"] * len(data or [])
"""


@pytest.mark.parametrize("config", ["", "asyncCommunication: true", "continuousBatching: true"])
def test_what_a_handler_counts_before_it_raises_is_counted(server, config):
    name = re.sub(r"\W+", "_", f"invalid {config}")
    source = INVALID.replace("def", "async def") if "async" in config else INVALID
    server.install(source, name, config)
    for body, status in (("good", 200), ("bad", 503), ("refused", 422)):
        assert server.predict(name, data=body).status_code == status
    assert value(server, "Invalid", ModelName=name) == 2
    assert value(server, "Rows", ModelName=name) == 3


@pytest.mark.parametrize("config", ["", "isolateFailures: false"])
def test_what_a_handler_counts_in_a_failed_batch_is_counted_once(server, background, config):
    name = re.sub(r"\W+", "_", f"batch {config}")
    server.install(INVALID, name, config, batch_size=8, max_batch_delay=60_000)
    bodies = ["good", "bad", "good", "good", "refused", "good", "good", "good"]
    asked = [background(server.predict, name, data=body) for body in bodies]
    statuses = [each.result().status_code for each in asked]
    isolated = [{"good": 200, "bad": 503, "refused": 422}[body] for body in bodies]
    assert statuses == isolated or (config and len({*statuses}) == 1)
    assert value(server, "Rows", ModelName=name) == 8
    assert value(server, "Invalid", ModelName=name) == (1 if config else 2)


YAML = """
dimensions:
  - &model "ModelName"
ts_metrics:
  counter:
    - {name: Requests2XX, unit: Count, dimensions: [Level, Hostname]}
  histogram:
    - {name: QueueTime, unit: Milliseconds, dimensions: [Level, Hostname], buckets: [1, 60000]}
  gauge:
    - {name: CPUUtilization, unit: Percent, dimensions: [Level, Hostname]}
model_metrics:
  gauge:
    - {name: Thinking, unit: ms, dimensions: ["Stage", *model, "Level"]}
"""
COLLECTOR = """
import sys
pids = sys.stdin.readline().split(",")
print(f"CPUUtilization.Percent:{len(pids)}|#Level:Host|#hostname:x,1", flush=True)
print("nonsense")
print()
print(f"{pids[0]}:1000")
print("oh no", file=sys.stderr)
"""


def test_metrics_as_the_operator_wants_them(prepare_server, wait_for):
    with prepare_server(metric_time_interval="0.2", metrics_mode="prometheus") as server:
        files = {"metrics.yaml": YAML, "collector.py": COLLECTOR}
        for name, text in files.items():
            (server.directory / name).write_text(text)
        server.write_property("metrics_config", "metrics.yaml")
        server.write_property("system_metrics_cmd", "collector.py --gpu 0")
        server.write_property("disable_system_metrics", "false")
        server.start()
        announced = re.findall(r"^# TYPE (\w+) ", page(server).text, re.MULTILINE)
        assert [name for name in announced if not name.startswith("marserve_")] == [
            "Requests2XX",
            "QueueTime",
            "CPUUtilization",
            "Thinking",
        ]
        assert "Thinking{" not in page(server).text
        server.install(CUSTOM, "custom")
        assert server.predict("custom").text == "fine"
        wait_for(lambda: value(server, "CPUUtilization") == 1)
        assert value(server, "QueueTime_count", Level="Host") == 1
        assert value(server, "Thinking", Stage="late", ModelName="custom") == 12.5
        text = page(server).text
        assert "PredictionTime" not in text
        assert "metric with unit: ms\n# TYPE Thinking gauge" in text
        server.wait_logged("ts_log.log", "system_metrics_cmd: oh no")
        server.wait_logged("ts_log.log", 'Failed to parse metrics line: "nonsense".')
        server.stop()
        assert server.log("ts_metrics.log") == server.log("model_metrics.log") == ""


def test_a_metrics_config_that_cannot_be_used_costs_no_request(prepare_server, handlers):
    with prepare_server(metrics_config="/no/such/metrics.yaml") as server:
        server.start()
        server.install(handlers / "lab.py", "lab")
        assert server.ask("lab", id=1).status_code == 200
        assert value(server, "Requests2XX") > 0
        server.wait_logged("ts_log.log", "/no/such/metrics.yaml")
        server.stop()


DECLARING = """
model_metrics:
  counter:
    - {name: Questions, unit: count, dimensions: []}
    - {name: Starts, unit: count, dimensions: [ModelName, Level]}
    - {name: Looks, unit: count, dimensions: [ModelName]}
  gauge:
    - {name: Width, unit: count, dimensions: [ModelName]}
    - {name: Weight, unit: kB, dimensions: [ModelName, Level]}
"""
DECLARED = """
from ts.metrics.dimension import Dimension
from ts.metrics.metric_type_enum import MetricTypes

class Measuring:
    def initialize(self, context):
        metrics = context.metrics
        self.questions = metrics.add_metric_to_cache(
            metric_name="Questions", unit="count", dimension_names=[]
        )
        metrics.add_metric(
            name="Starts", value=1, unit="count", metric_type=MetricTypes.COUNTER
        )

    def handle(self, data, context):
        metrics = context.metrics
        self.questions.add_or_update(value=1, dimension_values=[])
        metrics.get_metric(metric_name="Looks").add_or_update(1, [context.model_name])
        width = metrics.get_metric(metric_name="Width", metric_type=MetricTypes.GAUGE)
        width.add_or_update(value=len(data), dimension_values=[context.model_name])
        metrics.add_size(name="Weight", value=0.25, idx=None, unit="kB")
        metrics.add_time("Undeclared", 1, dimensions=[Dimension(name="Stage", value="x")])
        return ["fine"] * len(data)
"""


def test_handlers_find_the_metrics_that_the_file_declares(prepare_server):
    with prepare_server() as server:
        (server.directory / "metrics.yaml").write_text(DECLARING)
        server.write_property("metrics_config", "metrics.yaml")
        server.start()
        server.install(DECLARED, "measuring")
        # Reported by initialize(), before anybody asked anything.
        assert value(server, "Starts", ModelName="measuring", Level="Model") == 1
        for _ in range(2):
            assert server.predict("measuring").text == "fine"
        text = page(server).text
        host = re.search(r'^Questions\{Hostname="([^"]+)",\} 2\.0$', text, re.MULTILINE)[1]
        assert f'\nLooks{{ModelName="measuring",Hostname="{host}",}} 2.0\n' in text
        assert f'\nWidth{{ModelName="measuring",Hostname="{host}",}} 1.0\n' in text
        assert f'\nWeight{{ModelName="measuring",Level="Model",Hostname="{host}",}} 0.25\n' in text
        assert "Undeclared" not in text
        server.stop()
        assert server.log("ts_log.log").count("Undeclared") == 1
        assert "Undeclared" not in server.log("model_metrics.log")


def test_the_legacy_page_has_what_the_legacy_log_has_not(prepare_server):
    with prepare_server(metrics_mode="legacy") as server:
        server.start()
        server.install(CUSTOM, "custom")
        assert server.predict("custom").text == "fine"
        names = set(re.findall(r"^# TYPE (?!marserve_)(\w+)", page(server).text, re.MULTILINE))
        server.wait_logged("ts_metrics.log", "QueueTime")
        logged = set(re.findall(r" - (\w+)\.", server.log("ts_metrics.log")))
        assert names == {name for name in COUNTERS if name.startswith("ts_")}
        assert {"Requests2XX", "QueueTime"} <= logged
        assert not names & logged
        server.wait_logged("model_metrics.log", "PredictionTime.ms:")
        server.stop()


def test_switched_off(prepare_server):
    with prepare_server(enable_metrics_api="false") as server:
        del server.ports["metrics"]
        server.start()
        assert server.inference("GET", "/ping").status_code == 200
        assert "Metrics API" not in server.console_text()
        server.stop()
