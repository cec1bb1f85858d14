"""The configuration of the export of spans, and its queue."""

import pytest

from marserve.frontend.telemetry.trace_context import Sampling, TraceContext
from marserve.frontend.tracing import otel
from marserve.frontend.tracing.otel import SpanExport, find_receiver, sampling_of
from marserve.frontend.tracing.time_lines import TimeLine, TimeLines


@pytest.mark.parametrize(
    ("endpoint", "environ", "found"),
    [
        (None, {}, None),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, None),
        ("http://a:1", {}, "http://a:1/v1/traces"),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://b:2/"}, "http://b:2/v1/traces"),
        (None, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c/x"}, "http://c/x"),
        (
            "http://a:1",
            {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c/x"},
            "http://a:1/v1/traces",
        ),
        ("http://a:1", {"OTEL_SDK_DISABLED": "true"}, None),
        ("http://a:1", {"OTEL_TRACES_EXPORTER": "none"}, None),
    ],
)
def test_the_receiver_is_that_of_the_configuration(endpoint, environ, found):
    assert find_receiver(endpoint, environ) == found


def test_missing_packages_are_named(caplog, monkeypatch):
    monkeypatch.setattr(otel, "PACKAGES", ("no-such-package",))
    assert find_receiver("http://a:1", {}) is None
    assert "Install the extra marserve[otel]" in caplog.text
    assert "pip install no-such-package" in caplog.text
    caplog.clear()
    assert find_receiver(None, {}) is None
    assert not caplog.text


@pytest.mark.parametrize(
    ("ratio", "name", "argument", "sampling"),
    [
        (None, None, None, Sampling(1.0)),
        (0.25, "always_on", "1", Sampling(0.25)),
        (None, "always_on", None, Sampling(1.0, is_parent_based=False)),
        (None, "always_off", None, Sampling(0.0, is_parent_based=False)),
        (None, "traceidratio", "0.5", Sampling(0.5, is_parent_based=False)),
        (None, "parentbased_always_on", None, Sampling(1.0)),
        (None, "parentbased_always_off", None, Sampling(0.0)),
        (None, "ParentBased_TraceIdRatio", "0.01", Sampling(0.01)),
        (None, "parentbased_traceidratio", None, Sampling(1.0)),
    ],
)
def test_the_sampling_is_that_of_the_configuration(ratio, name, argument, sampling):
    variables = {"OTEL_TRACES_SAMPLER": name, "OTEL_TRACES_SAMPLER_ARG": argument}
    environ = {key: text for key, text in variables.items() if text is not None}
    assert sampling_of(ratio, environ) == sampling


@pytest.mark.parametrize(("name", "argument"), [("xray", ""), ("traceidratio", "1.5")])
def test_a_wrong_sampler_is_named_and_counts_as_all(name, argument, caplog):
    environ = {"OTEL_TRACES_SAMPLER": name, "OTEL_TRACES_SAMPLER_ARG": argument}
    assert sampling_of(None, environ).ratio == 1.0
    assert (argument or name) in caplog.text


def test_a_full_queue_drops_and_counts(run):
    async def fill():
        dropped = []
        lines = TimeLines()
        model = lines.of_model("m", "1.0")
        lines.on_recorded = SpanExport("http://127.0.0.1:9", dropped.append).add
        passed_on = TraceContext("1" * 32, "2" * 16, 1)
        for trace in (passed_on, *[passed_on.recorded()] * 10_002):
            model.add(TimeLine("id", model, 0.0, 0.0, None, 1.0, trace=trace))
        return dropped

    assert run(fill()) == [3, 3]
