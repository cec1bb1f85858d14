"""Traces of a real server: what handlers get, what a receiver of spans gets, and what is logged."""

import itertools
import json
import re
import socket
import time
from pathlib import Path

import pytest
import requests
from grpc_client import connected
from otel_receiver import run_raw_receiver, run_receiver
from servers import free_ports, wait_for

pytestmark = pytest.mark.integration

DOCUMENTATION = Path(__file__).parents[2] / "docs" / "tracing.md"
CLIENTS_SPAN = "00f067aa0ba902b7"
NUMBERS = itertools.count(1)
HANDLER = """
class Spans:
    def initialize(self, context):
        self.initialized = True

    def handle(self, data, context):
        answers = []
        for place, row in enumerate(data):
            with context.span("tokenize", place, rows=len(data)) as span:
                with context.span("look up", place):
                    pass
                span.attributes["text"] = str(row["body"])
            trace = context.trace(place)
            if row["body"] == b"fail":
                with context.span("failing", place):
                    raise ValueError("no such word")
            answers.append({
                "traceparent": context.get_request_header(place, "traceparent"),
                "tracestate": context.get_request_header(place, "tracestate"),
                "trace": trace and [trace.trace_id, trace.span_id, trace.sampled],
                "span": span.traceparent,
            })
        return answers
"""
ASYNC = """
class Caller:
    def initialize(self, context):
        pass

    async def handle(self, data, context):
        plain = await context.infer("spans", b"one")
        with context.span("ask"):
            inside = await context.infer("spans", b"two")
        return [[plain.json(), inside.json()]]
"""
STAGES = """
from marserve.handlers.base_handler import BaseHandler

class Staged(BaseHandler):
    def initialize(self, context):
        self.context = context
        self.initialized = True

    def preprocess(self, data):
        with self.context.span("prepare"):
            return data

    def inference(self, data):
        with self.context.span("infer"):
            return data

    def postprocess(self, data):
        with self.context.span("finish"):
            return ["done" for _ in data]
"""
#: The spans of a request to HANDLER.
OWN = ("predict spans", "waiting", "handler", "tokenize", "look up")


def new_trace():
    return f"{next(NUMBERS):032x}"


def header(trace_id, flags="01", **more):
    return {"traceparent": f"00-{trace_id}-{CLIENTS_SPAN}-{flags}", **more}


@pytest.fixture(scope="module")
def receiver():
    with run_receiver() as running:
        yield running


@pytest.fixture(scope="module")
def server(start_server, receiver):
    """A server that records only what its clients have sampled."""
    settings = {"otel_endpoint": receiver.url, "trace_sample_ratio": "0"}
    with start_server(**settings) as running:
        running.install(HANDLER, "spans")
        yield running


@pytest.fixture
def assert_nothing_else(server, receiver):
    """After the test, no trace has spans but those that it names."""
    before = {span.trace_id for span in receiver.spans}

    def check(*trace_ids):
        mark = new_trace()
        server.predict("spans", data=b"x", headers=header(mark))
        receiver.wait(mark, *OWN)
        assert {span.trace_id for span in receiver.spans} - before == {mark, *trace_ids}

    return check


# -- HTTP ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/predictions/spans", "/predictions/spans/1.0", "/spans/predict"])
def test_a_sampled_request_leaves_its_spans(server, receiver, path):
    trace_id = new_trace()
    answer = server.inference("POST", path, data=b"word", headers=header(trace_id)).json()
    spans = receiver.wait(trace_id, *OWN)
    whole, handler, own = spans["predict spans"], spans["handler"], spans["tokenize"]
    assert (whole.kind, whole.parent, whole.error) == ("SERVER", CLIENTS_SPAN, None)
    assert spans["waiting"].parent == handler.parent == own.parent == whole.id
    assert spans["look up"].parent == own.id
    assert whole.start <= spans["waiting"].start <= spans["waiting"].end <= handler.start
    assert handler.start <= own.start <= spans["look up"].start <= own.end <= handler.end
    assert handler.end <= whole.end
    assert own.attributes == {"rows": 1, "text": "bytearray(b'word')"}
    assert answer["traceparent"] == f"00-{trace_id}-{whole.id}-01"
    assert answer["trace"] == [trace_id, whole.id, True]
    assert answer["span"] == f"00-{trace_id}-{own.id}-01"


def test_the_attributes_of_the_request_and_of_its_batch(server, receiver):
    trace_id = new_trace()
    answer = server.predict("spans?q=secret", data=b"word", headers=header(trace_id))
    spans = receiver.wait(trace_id, *OWN)
    assert spans["predict spans"].attributes == {
        "http.request.method": "POST",
        "url.path": "/predictions/spans",
        "http.request.body.size": 4,
        "http.response.status_code": 200,
        "marserve.request.id": answer.headers["x-request-id"],
        "marserve.model.name": "spans",
        "marserve.model.version": "1.0",
        "marserve.outcome": "answered",
    }
    of_batch = spans["handler"].attributes
    assert of_batch["marserve.batch.size"] == 1
    assert of_batch["marserve.worker.id"] == int(server.worker("spans")["id"])
    resource = spans["handler"].resource
    assert resource["service.name"] == "marserve"
    assert resource["telemetry.sdk.name"] == "opentelemetry"


def test_a_tracestate_is_passed_on(server, receiver):
    trace_id, state = new_trace(), "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE"
    headers = header(trace_id, tracestate=state)
    answer = server.predict("spans", data=b"word", headers=headers).json()
    assert answer["tracestate"] == state
    assert receiver.wait(trace_id, *OWN)["handler"].state == state


@pytest.mark.parametrize("state", ["1a=x", "a=b,a=c", "a@1=x", "nonsense"])
def test_a_malformed_tracestate_is_dropped_without_a_line_in_the_log(server, receiver, state):
    before, trace_id = server.console_text(), new_trace()
    answer = server.predict("spans", data=b"x", headers=header(trace_id, tracestate=state)).json()
    assert answer["tracestate"] is None
    assert receiver.wait(trace_id, *OWN)["handler"].state == ""
    assert "opentelemetry" not in server.console_text()[len(before) :]


@pytest.mark.parametrize(
    "text",
    [
        "00-{id}-00f067aa0ba902b7-00",
        "00-{id}-00f067aa0ba902b7-1",
        "00-{id}-0000000000000000-01",
        "ff-{id}-00f067aa0ba902b7-01",
        "00-{id}-00F067AA0BA902B7-01",
    ],
)
@pytest.mark.parametrize("name", ["traceparent", "TraceParent"])
def test_what_is_not_sampled_or_malformed_leaves_nothing(server, assert_nothing_else, text, name):
    text = text.format(id=new_trace())
    answer = server.predict("spans", data=b"word", headers={name: text}).json()
    if name == "traceparent":
        assert answer["traceparent"] == text
    assert answer["trace"] is None or answer["trace"][2] is False
    assert answer["span"] in ("", text)
    assert_nothing_else()


def test_two_headers_are_malformed(server, assert_nothing_else):
    one, two = (f"traceparent: 00-{new_trace()}-{CLIENTS_SPAN}-01\r\n" for _ in range(2))
    head = f"POST /predictions/spans HTTP/1.1\r\nhost: a\r\n{one}{two}content-length: 1\r\n\r\nx"
    assert b"200" in server.exchange("inference", head.encode(), b"}")
    assert_nothing_else()


@pytest.fixture(scope="module")
def batches(server):
    """The name of a model that always runs three requests together."""
    server.install(HANDLER, "batches", "batchSize: 3\nmaxBatchDelay: 60000\n")
    return "batches"


def ask_together(server, together, model, flags):
    """Return the trace ids of requests with these flags."""
    ids = [new_trace() for _ in flags]
    headers = [header(id_, flag) for id_, flag in zip(ids, flags, strict=True)]
    together([lambda h=h: server.predict(model, data=b"x", headers=h) for h in headers])
    return ids


def test_a_batch_has_one_span_with_links_to_its_sampled_requests(
    server, receiver, together, batches
):
    ids = ask_together(server, together, batches, ("01", "00", "01"))
    sampled = [ids[0], ids[2]]
    own = ("predict batches", *OWN[1:])
    first = [trace_id for trace_id in sampled if receiver_has(receiver, trace_id, "batch")]
    spans = {
        trace_id: receiver.wait(trace_id, *own, *(["batch"] if trace_id in first else []))
        for trace_id in sampled
    }
    assert len(first) == 1
    batch = spans[first[0]]["batch"]
    requests_ = {(trace_id, found["predict batches"].id) for trace_id, found in spans.items()}
    assert batch.links == requests_
    assert all(found["handler"].links == {(batch.trace_id, batch.id)} for found in spans.values())
    assert batch.attributes["marserve.batch.size"] == 3
    assert not receiver.trace(ids[1])


def test_a_batch_with_one_sampled_request_has_no_span_of_its_own(
    server, receiver, together, batches
):
    sampled, *_ = ask_together(server, together, batches, ("01", "00", "00"))
    handler = receiver.wait(sampled, "predict batches", *OWN[1:])["handler"]
    assert handler.attributes["marserve.batch.size"] == 3
    assert not handler.links


def receiver_has(receiver, trace_id, name):
    wait_for(lambda: any(span.name == "batch" for span in receiver.spans))
    return any(span.name == name for span in receiver.trace(trace_id))


# -- gRPC, workflows, calls, stages ----------------------------------------------------------------


@pytest.mark.parametrize("service", ["inference", "open_inference"])
def test_metadata_of_grpc_carries_the_trace(server, receiver, service):
    trace_id = new_trace()
    metadata = list(header(trace_id).items())
    tensor = {"name": "body", "datatype": "BYTES", "shape": [1]}
    tensor["contents"] = {"bytes_contents": [b"word"]}
    method, fields = {
        "inference": ("Predictions", {"input": {"body": b"word"}}),
        "open_inference": ("ModelInfer", {"inputs": [tensor]}),
    }[service]
    with connected(server) as client:
        client.call(service, method, model_name="spans", metadata=metadata, **fields)
    whole = receiver.wait(trace_id, *OWN)["predict spans"]
    assert (whole.kind, whole.parent) == ("SERVER", CLIENTS_SPAN)
    assert whole.attributes["rpc.system.name"] == "grpc"
    assert whole.attributes["rpc.method"].endswith(f"/{method}")
    server.wait_logged("access_log.log", f"model=spans trace_id={trace_id}")


def test_the_nodes_of_a_workflow_are_children(server, receiver, make_archive, install_workflow):
    make_archive(server.store, HANDLER, "archive-of-node")
    text = "models: {m: {url: archive-of-node.mar}, n: {url: archive-of-node.mar}}\ndag: {m: [n]}\n"
    name, trace_id = install_workflow(text), new_trace()
    server.inference("POST", f"/wfpredict/{name}", data=b"x", headers=header(trace_id))
    inner = ("waiting", "handler", "tokenize", "look up")
    nodes = [f"predict {name}__m", f"predict {name}__n"]
    receiver.wait(trace_id, f"predict {name}", *nodes, *inner, *inner)
    by_name = {span.name: span for span in receiver.trace(trace_id)}
    whole = by_name[f"predict {name}"]
    assert (whole.kind, whole.parent) == ("SERVER", CLIENTS_SPAN)
    assert [(by_name[n].kind, by_name[n].parent) for n in nodes] == 2 * [("INTERNAL", whole.id)]
    parents = [span.parent for span in receiver.trace(trace_id) if span.name == "handler"]
    assert sorted(parents) == sorted(by_name[n].id for n in nodes)


def test_calls_of_other_models_are_children_of_the_request(server, receiver):
    server.install(ASYNC, "caller", "asyncCommunication: true\n")
    trace_id = new_trace()
    answers = server.predict("caller", data=b"x", headers=header(trace_id)).json()
    own = ("predict caller", "waiting", "handler", "ask")
    spans = receiver.wait(trace_id, *own, *OWN, *OWN)
    calls = [span for span in receiver.trace(trace_id) if span.name == "predict spans"]
    assert [each["trace"][1] for each in answers] == [span.id for span in calls]
    assert {span.parent for span in calls} == {spans["predict caller"].id}
    assert {span.kind for span in calls} == {"INTERNAL"}


def test_handlers_in_stages_add_spans(server, receiver):
    server.install(STAGES, "staged", "overlapStages: true\n")
    trace_id = new_trace()
    server.predict("staged", data=b"x", headers=header(trace_id))
    names = ("prepare", "infer", "finish")
    spans = receiver.wait(trace_id, "predict staged", "waiting", "handler", *names)
    assert {spans[name].parent for name in names} == {spans["predict staged"].id}


def test_the_handler_of_the_documentation(server, receiver):
    text = DOCUMENTATION.read_text(encoding="utf-8")
    server.install(text.partition("```python handler.py\n")[2].partition("```")[0], "words")
    trace_id = new_trace()
    answer = server.predict("words", data=b"to be", headers=header(trace_id)).json()
    own = receiver.wait(trace_id, "predict words", "waiting", "handler", "tokenize")["tokenize"]
    assert own.attributes == {"bytes": 5, "words": 2}
    assert answer == {"words": 2, "traceparent": f"00-{trace_id}-{own.id}-01"}


# -- failures --------------------------------------------------------------------------------------


def test_a_failure_is_found_by_its_trace(server, receiver):
    trace_id = new_trace()
    answer = server.predict("spans", data=b"fail", headers=header(trace_id))
    body = answer.json()
    assert list(body) == ["code", "type", "message", "requestId", "traceId"]
    assert body["requestId"] == answer.headers["x-request-id"]
    assert body["traceId"] == trace_id
    spans = receiver.wait(trace_id, "predict spans", "waiting", "failing", *OWN[3:])
    assert spans["predict spans"].error == "ValueError: no such word"
    assert spans["failing"].error == "ValueError: no such word"
    assert spans["predict spans"].attributes["http.response.status_code"] == answer.status_code
    server.wait_logged("model_log.log", f"Request ids: {body['requestId']} Trace ids: {trace_id}")
    server.wait_logged("access_log.log", f"trace_id={trace_id}")


def test_an_error_without_a_trace_has_torchserves_members(server):
    assert list(server.predict("nobody").json()) == ["code", "type", "message"]
    body = server.predict("nobody", headers=header(new_trace(), "00")).json()
    assert list(body) == ["code", "type", "message", "requestId", "traceId"]


def test_a_receiver_that_is_down_does_not_matter_and_is_logged_once(prepare_server):
    (port,) = free_ports(1)
    settings = {"otel_endpoint": f"http://127.0.0.1:{port}", "stop_grace": "20"}
    # The exporter tries again for this time, and logs a line each time.
    with prepare_server({"OTEL_EXPORTER_OTLP_TIMEOUT": "1"}, **settings) as server:
        server.start()
        server.install(HANDLER, "spans")

        def send(dropped):
            assert server.predict("spans", data=b"x", headers=header(new_trace())).ok
            wait_for(
                lambda: sum(server.metrics("marserve_dropped_spans_total").values()) >= dropped
            )

        send(len(OWN))
        server.wait_logged("ts_log.log", "Spans are dropped until http://127.0.0.1:")
        send(2 * len(OWN))
        send(3 * len(OWN))
        later = server.log("ts_log.log").partition("; the next failures are not logged.")[2]
        assert "OpenTelemetry" not in later
        with run_receiver(port) as receiver:
            trace_id = new_trace()
            assert server.predict("spans", data=b"x", headers=header(trace_id)).ok
            receiver.wait(trace_id, *OWN)
            server.wait_logged("ts_log.log", f":{port}/v1/traces accepts spans again.")
            server.stop()


def test_the_stop_does_not_wait_for_a_receiver_that_does_not_answer(start_server):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with start_server(otel_endpoint=f"http://127.0.0.1:{port}") as server:
            server.install(HANDLER, "spans")
            assert server.predict("spans", data=b"x", headers=header(new_trace())).ok
            connection, _ = silent.accept()  # a message is on its way
            server.stop()
            connection.close()
            server.wait_printed("The last spans were not sent")


def test_spans_that_are_redirected_count_as_dropped(start_server):
    head = b"HTTP/1.1 302 Found\r\nLocation: /v1/traces\r\nContent-Length: 0\r\n\r\n"
    with (
        run_raw_receiver(lambda connection: connection.sendall(head)) as receiver,
        start_server(otel_endpoint=receiver.url) as server,
    ):
        server.install(HANDLER, "spans")
        assert server.predict("spans", data=b"x", headers=header(new_trace())).ok
        name = "marserve_dropped_spans_total"
        wait_for(lambda: sum(server.metrics(name).values()) == len(OWN))
        server.wait_logged("ts_log.log", "the receiver answered 302 Found, which is no success")


def test_the_stop_does_not_wait_for_a_receiver_whose_answers_do_not_end(start_server):
    def answer(connection):
        for _ in range(1000):
            connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            time.sleep(0.1)

    with run_raw_receiver(answer) as receiver, start_server(otel_endpoint=receiver.url) as server:
        server.install(HANDLER, "spans")
        assert server.predict("spans", data=b"x", headers=header(new_trace())).ok
        wait_for(lambda: receiver.messages)
        began = time.monotonic()
        server.stop()
        assert time.monotonic() - began < 20


# -- sampling --------------------------------------------------------------------------------------


def test_a_share_of_the_requests_without_a_trace_starts_one(start_server, receiver):
    with start_server(otel_endpoint=receiver.url, trace_sample_ratio="0.01") as server:
        server.install(HANDLER, "hundredth")
        with requests.Session() as session:
            url = f"http://127.0.0.1:{server.ports['inference']}/predictions/hundredth"
            answers = [session.post(url, data=b"x").json() for _ in range(1500)]
        sampled = [each["trace"] for each in answers if each["trace"] is not None]
        assert 0 < len(sampled) < 100  # 15 are expected
        assert all(each["traceparent"] is None for each in answers if each["trace"] is None)
    # The stop has sent the last ones.
    roots = {s.trace_id: s for s in receiver.spans if s.name == "predict hundredth"}
    assert sorted(roots) == sorted(trace[0] for trace in sampled)
    assert {(span.kind, span.parent) for span in roots.values()} == {("SERVER", "")}


def test_the_variables_of_opentelemetry_configure_it(prepare_server, receiver):
    environment = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url,
        "OTEL_EXPORTER_OTLP_HEADERS": "api-key=abc",
        "OTEL_SERVICE_NAME": "words",
        "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=test",
        "OTEL_TRACES_SAMPLER": "always_on",
    }
    trace_id = new_trace()
    with prepare_server(environment) as server:
        server.start()
        server.install(HANDLER, "spans")
        server.predict("spans", data=b"x", headers=header(trace_id, "00"))
        span = receiver.wait(trace_id, *OWN)["handler"]
        assert span.resource["service.name"] == "words"
        assert span.resource["deployment.environment.name"] == "test"
        assert {key.lower(): text for key, text in receiver.headers[-1].items()}["api-key"] == "abc"
        server.stop()


# -- without OpenTelemetry -------------------------------------------------------------------------


def test_without_a_receiver_headers_pass_through(start_server):
    with start_server(log_format="json") as server:
        server.install(HANDLER, "spans")
        trace_id = new_trace()
        headers = header(trace_id, tracestate="a=b")
        answer = server.predict("spans", data=b"x", headers=headers)
        assert answer.json()["traceparent"] == headers["traceparent"]
        assert answer.json()["tracestate"] == "a=b"
        server.wait_logged("access_log.log", trace_id)
        line = json.loads(server.log("access_log.log").splitlines()[-1])
        assert line["trace_id"] == trace_id
        assert line["request_id"] == answer.headers["x-request-id"]
        for file in ("access_log.log", "ts_log.log"):
            assert documented_members(file) >= set(json.loads(server.log(file).splitlines()[-1]))


def documented_members(file):
    """The members of the lines of a file, by the table of docs/tracing.md."""
    rows = re.findall(
        r"^\| `(\w+\.log)`.*?\| (`time`.*) \|$", DOCUMENTATION.read_text(), re.MULTILINE
    )
    return set(re.findall(r"`(\w+)`", dict(rows)[file]))
