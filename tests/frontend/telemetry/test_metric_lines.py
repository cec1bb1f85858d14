from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marserve.frontend.telemetry.metric_lines import parse_metric_line

END = "|#hostname:box,1795210584"


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
def test_lines_of_torchserve_are_read(line: str, expected: list[Any]) -> None:
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
def test_others_are_none(line: str) -> None:
    assert parse_metric_line(line) is None


@given(st.text(), st.sampled_from(["", "[METRICS]", "[METRICS]A.ms:1|#", f"A.ms:1|#x:1{END}"]))
def test_no_text_does_any_harm(text: str, start: str) -> None:
    row = parse_metric_line(start + text)
    assert row is None or len(row) == 6
