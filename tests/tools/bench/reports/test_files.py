import json

import pytest
from measurements import run, session

from marserve.tools.bench.reports.files import check_writable, write_reports


def test_the_reports_that_are_asked_for_are_written(tmp_path):
    paths = {kind: tmp_path / f"report.{kind}" for kind in ("json", "csv", "html")}
    write_reports(session(run()), **paths)
    assert json.loads(paths["json"].read_text())["target"]["model"] == "resnet"
    assert paths["csv"].read_bytes().count(b"\r\n") == 2
    assert paths["html"].read_text().startswith("<!DOCTYPE html>")


def test_no_report_is_written_that_nobody_asked_for(tmp_path):
    write_reports(session(run()), csv=tmp_path / "one.csv")
    assert [path.name for path in tmp_path.iterdir()] == ["one.csv"]


def test_what_cannot_be_written_is_told_and_keeps_no_other_from_being_written(tmp_path):
    (tmp_path / "folder.csv").mkdir()
    missing = tmp_path / "missing" / "report.json"
    with pytest.raises(OSError) as output:
        write_reports(
            session(run()), json=missing, csv=tmp_path / "folder.csv", html=tmp_path / "a.html"
        )
    assert str(output.value) == (
        f"The report {missing} cannot be written: No such file or directory. "
        f"The report {tmp_path / 'folder.csv'} cannot be written: Is a directory."
    )
    assert (tmp_path / "a.html").is_file()


def test_looking_whether_a_report_can_be_written_leaves_no_trace(tmp_path):
    old = tmp_path / "old.json"
    old.write_text("yesterday")
    check_writable(old)
    check_writable(tmp_path / "new.json")
    assert [path.name for path in tmp_path.iterdir()] == ["old.json"]
    assert old.read_text() == "yesterday"
    with pytest.raises(OSError, match=r"nowhere/a\.json cannot be written: No such file"):
        check_writable(tmp_path / "nowhere" / "a.json")
