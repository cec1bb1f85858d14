from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from steps import page_of

from marserve.frontend.telemetry import handler_metrics
from marserve.frontend.telemetry.handler_metrics import HandlerMetrics, ModelRows, parse_metric_line
from marserve.frontend.telemetry.metrics_config import (
    Declared,
    MetricsConfig,
    parse_metrics_config,
)
from marserve.frontend.telemetry.series import Registry, Series

DIMENSIONS = [["ModelName", "kitten"], ["Level", "Model"]]
LABELS = 'ModelName="kitten",Level="Model",Hostname="host"'
DECLARED = b"""
model_metrics:
  counter:
    - {name: Mice, unit: Tails, dimensions: [Who, Where]}
    - {name: two words, unit: u, dimensions: []}
  histogram:
    - {name: Purr, unit: Hertz, dimensions: [ModelName, Level], buckets: [20, 30]}
"""

END = "|#hostname:box,1795210584"

Updates = list[tuple[str, tuple[str, ...], float, str | None]]


class Lab:
    """Handler metrics with a registry and a log."""

    def __init__(self, config: MetricsConfig) -> None:
        self.registry = Registry()
        self.metrics = HandlerMetrics(self.registry, "host", config)
        self.updates: Updates = []
        self.metrics.log = self
        self.rows = ModelRows(self.metrics)

    def report(self, series: Series, value: float, request_ids: str | None) -> None:
        self.updates.append((series.family.name, series.values, value, request_ids))

    def write(self, *_: object) -> None:
        pass

    def samples(self, name: str) -> list[str]:
        return [line for line in page_of(self.registry).splitlines() if line.startswith(name)]


@pytest.fixture
def lab():
    return Lab(MetricsConfig({}, {}, keeps_undeclared=True))


@pytest.fixture
def declared():
    return Lab(parse_metrics_config(DECLARED))


def row(
    kind: str, name: str, value: Any, dimensions: Any = DIMENSIONS, ids: Any = ("id",)
) -> list[Any]:
    return [kind, name, "ms", value, dimensions, ids]


# -- undeclared metrics --------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "total"), [("counter", "5.0"), ("gauge", "3.0")])
def test_a_row_becomes_a_metric_when_it_is_first_seen(kind, total, lab):
    lab.rows.record([row(kind, "Cats", 2), row(kind, "Cats", 3)])
    assert lab.samples("Cats") == [f"Cats{{{LABELS},}} {total}"]
    assert f"# TYPE Cats {kind}" in page_of(lab.registry)
    assert "metric with unit: ms" in page_of(lab.registry)


def test_a_histogram_is_observed(lab):
    lab.rows.record([row("histogram", "Cats", 2), row("histogram", "Cats", 3)])
    assert lab.samples("Cats_sum")[0].endswith(" 5.0")


def test_each_value_of_a_dimension_is_a_series_whatever_their_order(lab):
    lion = [["ModelName", "lion"], ["Level", "Model"]]
    lab.rows.record(
        [
            row("counter", "Cats", 1),
            row("counter", "Cats", 1, lion),
            row("counter", "Cats", 1, lion[::-1]),
        ]
    )
    assert [line.rpartition(" ")[2] for line in lab.samples("Cats")] == ["1.0", "2.0"]


@pytest.mark.parametrize(
    "bad",
    [
        row("counter", "Dogs", -1),
        row("counter", "Dogs", "many"),
        row("counter", "Dogs", 10**400),
        row("summary", "Dogs", 1),
        row("", "Dogs", 1),
        row("counter", "Dogs", 1, 7),
        row("counter", "Dogs", 1, [["a"]]),
        row("counter", "Dogs", 1, [[["a"], "b"]]),
        row("counter", "Dogs", 1, ids=7),
        row("counter", "Dogs", 1, ids=[7]),
        ["counter"],
        [],
        None,
    ],
    ids=repr,
)
def test_an_invalid_row_is_logged_once_and_affects_no_other(bad, lab, caplog):
    good = row("counter", "Cats", 1)
    lab.rows.record([good, bad, good])
    lab.rows.record([bad])
    assert lab.samples("Cats{")[0].endswith(" 2.0")
    assert len(caplog.records) == 1
    assert len(lab.updates) == 2


@pytest.mark.parametrize(
    "unlucky",
    [
        row("counter", "no name", 1),
        row("counter", "Dogs", 1, [["no label", "x"]]),
        row("counter", "Dogs", 1, [["twice", "x"], ["twice", "y"]]),
        row("counter", "Cats", 1, [["Other", "x"]]),
        row("counter", "Taken", 1),
    ],
    ids=repr,
)
def test_metrics_that_are_invalid_on_the_page_are_in_the_log(unlucky, lab, caplog):
    lab.registry.add(Declared("counter", "Taken", "", ()))
    good = row("counter", "Cats", 1)
    lab.rows.record([good, unlucky, unlucky])
    (sample,) = lab.samples("Cats{")
    assert sample.endswith(" 1.0")
    assert len(caplog.records) == 1
    assert [name for name, *_ in lab.updates] == ["Cats", unlucky[1], unlucky[1]]


def test_undeclared_metrics_are_left_out_and_logged_once(caplog):
    lab = Lab(MetricsConfig({}, {}))
    lab.rows.record([row("counter", "Cats", 1)] * 2)
    assert lab.updates == []
    assert "Cats" not in page_of(lab.registry)
    (message,) = caplog.messages
    assert "Cats is left out" in message
    assert "model_metrics_auto_detect=true" in message


# -- what metrics.yaml declares --------------------------------------------------------------------


def test_a_declared_metric_is_announced_before_its_first_update(declared):
    text = page_of(declared.registry)
    assert "# HELP Mice Torchserve prometheus counter metric with unit: Tails\n" in text
    assert "# TYPE Mice counter\n" in text
    assert declared.samples("Mice") == []


@pytest.mark.parametrize(
    ("dimensions", "who"),
    [
        ([["Who", "tom"], ["Where", "attic"]], "tom"),
        ([["Where", "attic"], ["Who", "tom"]], "tom"),  # by name where the names are the same
        ([["ModelName", "tom"], ["Level", "attic"]], "tom"),  # else by position
    ],
)
def test_type_unit_and_labels_are_the_files(dimensions, who, declared):
    declared.rows.record([row("gauge", "Mice", 2, dimensions), row("", "Mice", 2, dimensions)])
    (sample,) = declared.samples("Mice{")
    assert sample == f'Mice{{Who="{who}",Where="attic",Hostname="host",}} 4.0'
    assert declared.updates == [("Mice", (who, "attic", "host"), 2.0, "id")] * 2


def test_buckets_are_the_files(declared):
    declared.rows.record([row("gauge", "Purr", 25)])
    assert [line.rpartition(" ")[2] for line in declared.samples("Purr_bucket")] == [
        "0.0",
        "1.0",
        "1.0",
    ]


def test_too_many_dimensions_are_an_error(declared, caplog):
    declared.rows.record([row("counter", "Mice", 1, [["Who", "tom"]])])
    assert "Who, Where" in caplog.text
    assert declared.updates == []


def test_a_declared_name_that_is_invalid_in_prometheus_is_in_the_log(declared):
    declared.rows.record([row("counter", "two words", 3, [])])
    assert declared.updates == [("two words", ("host",), 3.0, "id")]
    assert "two words" not in page_of(declared.registry)


def test_the_server_updates_declared_series_only(declared):
    mice = declared.rows.own("Mice", "tom", "attic")
    assert mice is not None
    declared.rows.update(mice, 1.0, ["id-1", "id-2"])
    assert declared.samples("Mice{") != []
    assert declared.updates == [("Mice", ("tom", "attic", "host"), 1.0, "id-1,id-2")]
    assert declared.rows.own("Dogs", "rex") is None


# -- their end -------------------------------------------------------------------------------------


def test_series_end_with_the_last_model_that_took_part(lab):
    other = ModelRows(lab.metrics)
    lab.rows.record([row("counter", "Cats", 1), row("counter", "Dogs", 1)])
    other.record([row("counter", "Cats", 1)])
    lab.rows.end()
    assert lab.samples("Cats{") == [f"Cats{{{LABELS},}} 2.0"]
    assert "Dogs" not in page_of(lab.registry)
    other.end()
    assert page_of(lab.registry) == ""
    other.record([row("gauge", "Dogs", 1)])
    ModelRows(lab.metrics).record([row("gauge", "Cats", 1)])
    assert "Dogs" not in page_of(lab.registry)
    assert "# TYPE Cats gauge" in page_of(lab.registry)


def test_declared_metrics_stay_announced(declared):
    declared.rows.record([row("counter", "Mice", 1)])
    declared.rows.end()
    assert "# TYPE Mice counter" in page_of(declared.registry)
    assert declared.samples("Mice{") == []


# -- limits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "make"),
    [
        ("_MAX_NAMES", lambda number: row("counter", f"name_{number}", 1)),
        (
            "_MAX_SERIES_OF_A_MODEL",
            lambda number: row("counter", "Cats", 1, [["id", str(number)]]),
        ),
    ],
)
def test_beyond_the_limits_there_is_only_the_log(limit, make, lab, monkeypatch, caplog):
    monkeypatch.setattr(handler_metrics, limit, 3)
    lab.rows.record([make(number) for number in range(5)])
    assert len([line for line in page_of(lab.registry).splitlines() if line[0] != "#"]) == 3
    assert len(lab.updates) == 5
    assert len(caplog.records) == 1


def test_what_is_logged_is_bounded(lab, caplog):
    for number in range(2000):
        lab.rows.record([row("", f"{number}" * 1000, 1)])
    assert len(caplog.records) <= 1001
    assert max(len(record.getMessage()) for record in caplog.records) < 1000


def test_the_help_of_a_declaration_has_its_unit():
    assert Declared("gauge", "A", "ms", ()).help == (
        "Torchserve prometheus gauge metric with unit: ms"
    )


# -- printed lines ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "[METRICS]HandlerTime.ms:1.5|#ModelName:probe,Level:Model|#type:GAUGE"
            "|#hostname:box,1795210584,id-1,id-2",
            [
                "gauge",
                "HandlerTime",
                "ms",
                1.5,
                [["ModelName", "probe"], ["Level", "Model"]],
                ["id-1", "id-2"],
            ],
        ),
        (
            f"CPUUtilization.Percent:0.0|#Level:Host{END}",
            ["", "CPUUtilization", "Percent", 0.0, [["Level", "Host"]], []],
        ),
        (
            f"A.ms:2|#x:1|#type:COUNTER{END},id",
            ["counter", "A", "ms", 2.0, [["x", "1"]], ["id"]],
        ),
        (f"A b.c d:-1e-05|#{END}", ["", "A b", "c d", -1e-05, [], []]),
        (
            f"INFO > [METRICS]A.ms:1|#x:1,bad,a:b:c,y:2{END},null",
            ["", "A", "ms", 1.0, [["x", "1"], ["y", "2"]], []],
        ),
    ],
)
def test_lines_of_torchserve_are_read(line, expected):
    assert parse_metric_line(line) == expected


@pytest.mark.parametrize(
    "line",
    [
        "",
        "[METRICS]",
        "A.ms:1",
        f"A:1|#Level:Host{END}",
        f"A.ms:|#Level:Host{END}",
        f"A.ms:None|#Level:Host{END}",
        f"A.ms:+1|#Level:Host{END}",
        f"A.ms:nan|#Level:Host{END}",
        f"A.ms:1,5|#Level:Host{END}",
        f"A.ms:1e999|#Level:Host{END}",
        f"A-b.ms:1|#Level:Host{END}",
        "A.ms:1|#Level:Host|#hostname:box",
        "A.ms:1|#Level:Host|#hostname:box,soon",
    ],
)
def test_other_lines_are_none(line):
    assert parse_metric_line(line) is None


@given(st.text(), st.sampled_from(["", "[METRICS]", "[METRICS]A.ms:1|#", f"A.ms:1|#x:1{END}"]))
def test_any_text_is_a_row_or_none(text, start):
    row = parse_metric_line(start + text)
    assert row is None or len(row) == 6
