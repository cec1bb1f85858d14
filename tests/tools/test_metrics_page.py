"""The metrics page of a server, as bench and doctor read it."""

import sys

import pytest

from marserve.tools.bench.errors import BenchError
from marserve.tools.metrics_page import metric_families


def test_families_are_read():
    (family,) = metric_families("# TYPE requests_total counter\nrequests_total 3.0\n")
    assert [(each.name, each.value) for each in family.samples] == [("requests_total", 3.0)]


def test_another_format_has_no_families():
    assert metric_families("<html>{") == []


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client.parser", None)
    with pytest.raises(BenchError, match="pip install prometheus-client"):
        metric_families("")
