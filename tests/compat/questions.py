# ruff: noqa: E501  the questions are tables; wide lines keep one question on one line
"""Everything that is asked of both servers, by configuration."""

from collections.abc import Iterator, Sequence

from archives import BROKEN_MANIFESTS
from steps import (
    FORM,
    JSON,
    OCTETS,
    TEXT,
    Ask,
    Ready,
    Setting,
    Step,
    Together,
    install,
    manage,
    order,
    predict,
    register,
)

OPEN = {"enable_model_api": "true", "disable_token_authorization": "true"}
LISTENERS = ("inference", "management", "metrics")
LIMIT = 100_000

HOST = b"Host: 127.0.0.1\r\n"


def raw(name: str, *pieces: bytes, note: str = "", to: str = "inference") -> Ask:
    """A request given by its bytes; the name begins with its method."""
    return Ask(name, note, to, raw=pieces)


def multipart(*parts: str, boundary: str = "edge") -> str:
    """A multipart body of parts, each a block of headers, an empty line and a content."""
    blocks = "".join(f"--{boundary}\r\n{part}\r\n" for part in parts)
    return f"{blocks}--{boundary}--\r\n"


def part(name: str, content: str, file: str = "", kind: str = "") -> str:
    """A part of a multipart body."""
    disposition = f'Content-Disposition: form-data; name="{name}"'
    if file:
        disposition += f'; filename="{file}"'
    lines = [disposition, *([f"Content-Type: {kind}"] if kind else []), "", content]
    return "\r\n".join(lines)


def empty_server() -> Iterator[Step]:
    """Before any model is there."""
    for method in ("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"):
        yield Ask(f"{method} /ping")
    yield Ask("GET /ping/deeper/still")
    yield Ask("GET /ping/")
    yield Ask("GET /%70ing")
    yield Ask("GET //ping")
    yield Ask("GET /ping?query=1")
    for listener in LISTENERS:
        yield Ask("OPTIONS /", to=listener)
        yield Ask("GET /", to=listener)
        yield Ask("POST /", to=listener)
        yield Ask("GET /api-description", to=listener)
        yield Ask("DELETE /api-description", to=listener)
        yield Ask("GET /api-description/deeper", to=listener)
        yield Ask("GET /nowhere", to=listener)
        yield Ask("OPTIONS /nowhere", to=listener)
        yield Ask("HEAD /nowhere", to=listener)
        yield Ask("GET /token?type=management", to=listener)
        yield Ask("GET /v2", to=listener)
    yield Ask("GET /v2/health/live")
    yield Ask("GET /v2/health/ready")
    yield Ask("GET /v2/models/probe")
    yield Ask("GET /metrics")
    yield manage("GET /metrics")
    yield manage("GET /ping")
    yield manage("POST /predictions/probe")
    yield Ask("GET /models")
    yield Ask("GET /models/probe")
    yield Ask("GET /ping", to="metrics")
    yield Ask("GET /models", to="metrics")
    yield from (
        manage(f"{method} /models", "empty")
        for method in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD")
    )


def refused_registrations() -> Iterator[Step]:
    """Registrations that cannot be."""
    for query in (
        "", "url=", "model_name=x", "url=no.mar", "url=../no.mar", "url=a/../../no.mar",
        "url=/no/such/place", "url=s3://bucket/no.mar", "url=ftp://127.0.0.1/no.mar",
        "url=http://127.0.0.1:1/no.mar", "url=http://no.such.host.invalid/no.mar",
        "url={files}/absent.mar", "url=file:///no/such.mar", "url=probe.mar&runtime=java",
        "url=probe.mar&runtime=", "url=no-zip.mar", "url=no-tar.tar.gz", "url=slip.mar",
        "url=manifest-none.mar&initial_workers=1",
    ):  # fmt: skip
        yield register(query)
    for name in BROKEN_MANIFESTS:
        if name != "no-archiver":
            yield register(f"url=manifest-{name}.mar")
            yield manage("DELETE /models/odd", f"after manifest-{name}")
    yield register("url=manifest-no-json.mar")
    for body in ("{broken", "[]", "null", "", '{"url": 7}', '{"url": null}', "{}", '{"url": ""}'):
        yield manage("POST /models?url=probe.mar", f"JSON {body}", kind=JSON, body=body)
    yield manage("GET /models", "whatever is left of the refused")
    yield manage("DELETE /models/probe", "whatever is left of the refused")


def without_workers() -> Iterator[Step]:
    """A model that has no worker."""
    yield register("url=probe.mar")
    yield register("url=probe.mar", "twice")
    yield manage("GET /models/probe", "without workers")
    yield manage("GET /models/probe?customized=true", "without workers")
    yield manage("GET /v1/models/probe", "without workers")
    yield Ask("GET /ping", "with a model without workers")
    yield predict("probe", note="without workers")
    yield predict("probe/1.0", note="without workers")
    yield Ask("POST /explanations/probe", "without workers")
    yield Ask("POST /v1/models/probe:predict", "without workers")
    yield Ask("POST /invocations?model_name=probe", "without workers")
    yield manage("PUT /models/probe?min_worker=1&synchronous=true")
    yield manage("GET /models/probe", "with a worker")


def unknown_models() -> Iterator[Step]:
    """Models and versions that are not there; paths that lead nowhere; wrong methods."""
    for path in (
        "/predictions", "/predictions/", "/predictions/nobody", "/predictions/nobody/1.0",
        "/predictions/probe/9.9", "/predictions/probe/9.9/more", "/predictions//1.0",
        "/explanations", "/explanations/nobody", "/explanations/probe/9.9",
        "/invocations", "/invocations?model_name=nobody", "/invocations?model_name=", "/invocations/probe",
        "/models/nobody/invoke", "/models/probe/other", "/models/probe/invoke/more", "/models//invoke",
        "/nobody/predict", "/probe/9.9/predict", "/probe/1.0/other/predict", "/predict",
        "/v1/models/nobody:predict", "/v1/models/nobody:explain", "/v1/models/probe", "/v1/models/probe:other",
        "/v1/models/:predict", "/v1/models", "/v1", "/v1/models/probe/1.0:predict",
        "/v2/models/nobody/infer", "/v2/models/nobody/explain", "/v2/models/probe", "/v2/models/probe/ready",
        "/v2/models/probe/other", "/v2/models/probe/versions/1.0/infer", "/v2/models", "/v3/models/probe/infer",
        "/wfpredict/nobody", "/WfPredict/nobody", "/wfpredict", "/PREDICTIONS/probe", "/predictions/PROBE",
    ):  # fmt: skip
        yield Ask(f"POST {path}")
    yield Ask("OPTIONS /predictions/nobody")
    yield Ask("OPTIONS /predictions/probe/9.9")
    for path in ("/models/nobody", "/models/nobody/1.0", "/models/nobody/all", "/models/probe/9"):
        for method in ("GET", "PUT", "DELETE", "OPTIONS"):
            yield manage(f"{method} {path}")
    yield manage("PUT /models/nobody/1/set-default")
    yield manage("PUT /models/probe/9/set-default")
    yield manage("GET /models/probe/1.0/set-default")
    yield manage("POST /models/probe/1.0/set-default")
    yield manage("GET /models/nobody?customized=true")
    yield manage("GET /models/probe/all?customized=true")
    yield manage("PUT /models/probe?model_version=9")
    for path in (
        "/models/a/b/c",
        "/models/a/b/c/d",
        "/v1/models/nobody",
        "/v1/models",
        "/v1/models/probe/x",
    ):
        yield manage(f"GET {path}")
    for line in (
        "POST /models/probe",
        "PATCH /models/probe",
        "POST /models/probe/1.0",
        "PATCH /models/probe/1.0",
    ):
        yield manage(line)
    for method in ("POST", "PUT", "DELETE", "HEAD"):
        yield manage(f"{method} /v1/models/probe")
    for line in (
        "GET /workflows", "POST /workflows?url=x.war", "GET /workflows/nobody", "DELETE /workflows/nobody",
        "PUT /workflows/nobody", "PUT /workflows",
    ):  # fmt: skip
        yield manage(line)


def inputs() -> Iterator[Step]:
    """Every form a request can have, and what the handler sees of it."""
    for method in ("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"):
        yield Ask(f"{method} /predictions/probe")
    for kind, body in (
        ("", b"\x00\xffraw"), (OCTETS, b"\x00\xffraw"), ("image/jpeg", b"\xff\xd8"), ("", b""), (OCTETS, b""),
        (JSON, b'{"a": [1, null]}'), (f"{JSON}; charset=utf-8", b"[1, 2]"), (JSON, b"{broken"), (JSON, b""),
        ("Application/JSON", b"[1]"), ("application/json ;charset=x", b"[1]"), ("application/jsonl", b"[1]"),
        ("application/vnd.api+json", b"[1]"), (JSON, b"\xff"), (JSON, b'"text"'), (JSON, b"1e999"),
        (TEXT, "grüße".encode()), ("text/csv; charset=utf-8", b"a,b"), (TEXT, b"\xff"), ("Text/Plain", b"x"),
        ("text", b"x"), ("textual/thing", b"x"), ("text/html; charset=latin-1", b"\xe9"), (TEXT, b""),
        ("multipart/form-data", b"no boundary"), ("multipart/mixed; boundary=edge", b"--edge--"),
        (FORM, b"a=1&b=two+words%21"), (FORM, b"a=1&a=2"), (FORM, b"hello"), (FORM, b"a="), (FORM, b""),
        (FORM, b"a=1&hello"), (FORM, b"hello&a=1"), (FORM, b"=1"), (FORM, b"a=%zz"), (FORM, b"a=%"), (FORM, b"a=1;b=2"),
        (FORM, b"%61=1"), (FORM, b"a=%ff"), (FORM, b"a=b=c"), (FORM, b"&&a=1&&"), (f"{FORM}; charset=utf-8", b"a=1"),
        (FORM.upper(), b"a=1"), (FORM, b'{"a": 1}'),
    ):  # fmt: skip
        text = body.decode("latin-1")
        yield predict("probe", body, kind, f"{kind or 'no type'}: {text}")
    edge = "multipart/form-data; boundary=edge"
    for note, body in (
        ("files", multipart(
            part("data", "bytes", "cat.jpg", "image/jpeg"),
            part("labels", '["cat"]', "labels.json", JSON),
            part("note", "für dich", "note.txt", TEXT),
        )),
        ("a file without a type", multipart(part("data", "x", "f"))),
        ("fields", multipart(part("plain", "no file"), part("typed", '{"a": 1}', kind=JSON))),
        ("a name twice", multipart(part("data", "1", "a", OCTETS), part("data", "2", "b", OCTETS))),
        ("a field twice", multipart(part("data", "1"), part("data", "2"))),
        ("file and field", multipart(part("data", "1", "a", OCTETS), part("data", "2"))),
        ("an empty file", multipart(part("data", "", "a", OCTETS))),
        ("an empty field", multipart(part("data", ""))),
        ("no parts", multipart()),
        ("broken JSON", multipart(part("data", "{broken", "a", JSON))),
        ("JSON with charset", multipart(part("data", "[1]", "a", f"{JSON}; charset=utf-8"))),
        ("part named body", multipart(part("body", "x", "a", OCTETS))),
        ("part named like a header", multipart(part("Content-Type", "x", "a", OCTETS))),
        ("name not ascii", multipart(part("größe", "x", "a", OCTETS))),
        ("name with spaces", multipart(part("a b", "x"))),
        ("no name", "--edge\r\nContent-Type: text/plain\r\n\r\nx\r\n--edge--\r\n"),
        ("no end", "--edge\r\nContent-Disposition: form-data; name=\"a\"\r\n\r\nx"),
        ("another boundary", multipart(part("data", "x"), boundary="other")),
    ):  # fmt: skip
        yield predict("probe", body, edge, f"multipart: {note}")
    quoted = 'multipart/form-data; boundary="edge"'
    yield predict("probe", multipart(part("data", "x")), quoted, "multipart: quoted boundary")
    for path in (
        "probe/", "probe/1.0", "probe/1.0/", "pro%62e", "probe%2F1.0", "probe/1.0/v1/chat/completions",
        "probe/1.0/a%20b", "probe/1.0/a%2Fb", "probe/1.0/a//b", "probe/1.0/a/b/", "probe?a=1", "probe/1.0/x?a=1",
        "probe/1.0/gr%C3%BC%C3%9Fe", "probe/1.0/%ff", "probe/1.0/%zz", "probe/1.0/a+b", "probe;v=1", "probe#part",
    ):  # fmt: skip
        yield predict(path)
    for name, value in (
        ("X-CamelCase-Header", "Value"), ("x-request-id", "mine"), ("Expires", "x"), ("explain", "True"),
        ("url_path", "mine"), ("body", "mine"), ("describe", "True"), ("X-Empty", ""), ("Content-Encoding", "gzip"),
        ("ts_request_sequence_id", "s"), ("ts_stream_next", "true"), ("Connection", "close"), ("Accept", "text/html"),
    ):  # fmt: skip
        yield Ask(
            "POST /predictions/probe",
            f"{name}: {value}",
            headers={name: value},
            kind=OCTETS,
            body=b"x",
        )
    yield raw(
        "POST /predictions/probe",
        b"POST /predictions/probe HTTP/1.1\r\n"
        + HOST
        + b"X-Two: 1\r\nX-Two: 2\r\nContent-Length: 0\r\n\r\n",
        note="a header twice",
    )
    yield raw(
        "POST /predictions/probe",
        b"POST /predictions/probe HTTP/1.1\r\n"
        + HOST
        + b"Transfer-Encoding: chunked\r\nContent-Type: text/plain\r\n\r\n4\r\none \r\n3\r\ntwo\r\n0\r\n\r\n",
        note="chunked body",
    )
    yield raw(
        "POST /predictions/probe",
        b"POST http://127.0.0.1/predictions/probe HTTP/1.1\r\n"
        + HOST
        + b"Content-Length: 0\r\n\r\n",
        note="absolute form",
    )
    yield raw(
        "GET /ping",
        b"GET http://127.0.0.1/ping HTTP/1.1\r\n" + HOST + b"\r\n",
        note="absolute form",
    )
    yield raw("GET /ping", b"GET /ping HTTP/1.0\r\n\r\n", note="HTTP/1.0")
    yield raw(
        "GET /ping",
        b"GET /ping HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
        note="HTTP/1.0 keep-alive",
    )
    yield raw("GET /ping", b"GET /ping HTTP/1.1\r\n\r\n", note="no host")
    yield raw(
        "GET /ping",
        b"GET /ping HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n",
        note="asks for a close",
    )
    yield raw(
        "POST /predictions/probe",
        b"POST /predictions/probe HTTP/1.1\r\n"
        + HOST
        + b"Content-Length: 5\r\nExpect: 100-continue\r\n\r\n",
        b"hello",
        note="expects 100",
    )


def limits() -> Iterator[Step]:
    """Around the limits of sizes."""
    yield predict("lab", b'{"answer": 1}' + b" " * (LIMIT - 13), JSON, "body of exactly the limit")
    yield predict("lab", b"x" * (LIMIT + 1), OCTETS, "body beyond the limit")
    yield manage(
        "POST /models?url=probe.mar", "body beyond the limit", kind=OCTETS, body=b"x" * (LIMIT + 1)
    )
    start = b"POST /predictions/lab HTTP/1.1\r\n" + HOST
    yield raw(
        "POST /predictions/lab",
        start + b"Content-Length: 100001\r\nExpect: 100-continue\r\n\r\n",
        note="expects 100, too large",
    )
    yield raw(
        "POST /predictions/lab",
        start + b"Transfer-Encoding: chunked\r\n\r\n186a1\r\n" + b"x" * 100001 + b"\r\n0\r\n\r\n",
        note="chunked, too large",
    )
    yield raw(
        "POST /predictions/nobody",
        b"POST /predictions/nobody HTTP/1.1\r\n"
        + HOST
        + b"Content-Length: 100001\r\nExpect: 100-continue\r\n\r\n",
        note="expects 100, too large",
    )
    for size in (4080, 4200, 100_000):
        yield raw(
            "GET /ping",
            b"GET /ping?%b HTTP/1.1\r\n" % (b"a" * size) + HOST + b"\r\n",
            note=f"query of {size}",
        )
    for size in (8100, 8300, 100_000):
        yield raw(
            "GET /ping",
            b"GET /ping HTTP/1.1\r\n" + HOST + b"X-Long: " + b"a" * size + b"\r\n\r\n",
            note=f"header of {size}",
        )
    for note, request in (
        ("no HTTP", b"no http at all\r\n\r\n"),
        ("HTTP/9.9", b"GET /ping HTTP/9.9\r\n" + HOST + b"\r\n"),
        ("header without a colon", b"GET /ping HTTP/1.1\r\nno colon\r\n\r\n"),
        ("length is no number", b"POST /ping HTTP/1.1\r\n" + HOST + b"Content-Length: minus\r\n\r\n"),
        ("two lengths", b"POST /ping HTTP/1.1\r\n" + HOST + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd"),
        ("broken chunk", b"POST /ping HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n"),
        ("unknown method", b"BREW /ping HTTP/1.1\r\n" + HOST + b"\r\n"),
        ("lower-case method", b"get /ping HTTP/1.1\r\n" + HOST + b"\r\n"),
        ("unknown expectation", b"POST /ping HTTP/1.1\r\n" + HOST + b"Content-Length: 0\r\nExpect: cake\r\n\r\n"),
        ("broken escape", b"GET /ping%zz HTTP/1.1\r\n" + HOST + b"\r\n"),
        ("incomplete escape", b"GET /predictions/% HTTP/1.1\r\n" + HOST + b"\r\n"),
        ("path without a slash", b"GET ping HTTP/1.1\r\n" + HOST + b"\r\n"),
        ("path is a star", b"OPTIONS * HTTP/1.1\r\n" + HOST + b"\r\n"),
    ):  # fmt: skip
        yield raw("GET -", request, note=note)


def results() -> Iterator[Step]:
    """Every kind of result; status, headers and misdeeds of a handler."""
    yield install("results")
    for result in (
        "bytes", "bytearray", "str", "dict", "list", "nested", "int", "float", "bool", "none", "nan", "infinity",
        "empty", "empty dict", "tensor", "int keys", "tuple", "opaque", "set", "large", "too large", "unknown",
    ):  # fmt: skip
        yield predict("results", result, TEXT, f"result: {result}")
        if result == "too large":
            yield Ready("results")
    for json in (
        '{"status": [201]}', '{"status": [201, "Made"]}', '{"status": [204]}', '{"status": [304]}',
        '{"status": [302], "headers": {"Location": "/x"}}', '{"status": [400, "Bad"]}',
        '{"status": [404], "answer": "mine"}', '{"status": [418, "My Phrase"]}', '{"status": [500]}',
        '{"status": [503, "Busy"]}', '{"status": [507]}', '{"status": [600]}', '{"status": [299]}',
        '{"headers": {"X-Mine": "one"}}', '{"headers": {"x-request-id": "mine"}}', '{"headers": {"Pragma": "mine"}}',
        '{"headers": {"Connection": "close"}}', '{"headers": {"Content-Type": "text/mine"}}',
        '{"headers": {"content-type": "text/mine"}}', '{"headers": {"Cache-Control": "max-age=1"}}',
        '{"headers": {"Content-Length": "1"}, "answer": "whole"}', '{"headers": {"X-Empty": ""}}',
        '{"headers": {"Set-Cookie": "a=1"}}', '{"headers": {"X-Umlaut": "grün"}}',
        '{"type": "text/plain"}', '{"type": "application/json"}', '{"type": "text/plain", "headers": {"content-type": "x/y"}}',
        '{"do": "raise"}', '{"do": "memory"}', '{"do": "too few"}', '{"do": "too many"}', '{"do": "tuple"}', '{"do": "nothing"}',
        '{"do": "refuse", "message": "not so", "code": 400}', '{"do": "refuse", "message": "too large", "code": 413}',
        '{"do": "refuse", "message": "odd", "code": 299}', '{"do": "refuse", "message": "full", "code": 507}',
        '{"do": "refuse", "message": "", "code": 404}', '{"do": "refuse", "message": "grün <b>", "code": 500}',
        '{"do": "unserialisable", "answer": "object"}', '{"do": "garbage"}',
    ):  # fmt: skip
        yield order("lab", json)
    for json in ('{"do": "sys.exit"}', '{"do": "os._exit"}', '{"do": "segfault"}'):
        yield order("lab", json)
        yield order("lab", '{"answer": "after"}', f"after {json}")
        yield Ask("GET /ping", f"after {json}")
        yield Ready("lab")


def batches() -> Iterator[Step]:
    """What batch-mates get."""
    yield register(
        "url=lab.mar&model_name=batch3&batch_size=3&max_batch_delay=3000&initial_workers=1"
    )
    for name, orders in (
        ("good", ('{"answer": "one"}', '{"answer": "two"}', '{"answer": {"three": 3}}')),
        ("each its own", ('{"answer": "a", "headers": {"X-Mine": "one"}}', '{"status": [418, "My Phrase"]}', '{"type": "text/plain"}')),
        ("one raises", ("{}", '{"do": "raise"}', "{}")),
        ("one refuses", ("{}", '{"do": "refuse", "message": "not so", "code": 422}', "{}")),
        ("one out of memory", ("{}", '{"do": "memory"}', "{}")),
        ("too few", ("{}", '{"do": "too few"}', "{}")),
        ("too many", ("{}", '{"do": "too many"}', "{}")),
        ("one not serialisable", ("{}", '{"do": "unserialisable", "answer": "object"}', "{}")),
        ("one exits", ("{}", '{"do": "os._exit"}', "{}")),
    ):  # fmt: skip
        yield Together(f"batch: {name}", [order("batch3", json) for json in orders])
    yield manage("DELETE /models/batch3")


def other_routes() -> Iterator[Step]:
    """The other doors to a prediction."""
    yield install("describing")
    for path in (
        "/explanations/probe", "/explanations/probe/1.0", "/explanations/probe/1.0/more", "/explanations/describing",
        "/predictions/describing", "/invocations?model_name=probe", "/invocations?model_name=probe&a=1&b=two+words",
        "/invocations?model_name=probe&model_name=lab", "/models/probe/invoke", "/models/probe/invoke?a=1&a=2",
        "/probe/predict", "/probe/1.0/predict", "/probe/predict?a=1", "/v1/models/probe:predict", "/v1/models/probe:explain",
        "/v1/models/probe:predict?a=1", "/v1/models/pro%62e:predict", "/v2/models/probe/infer", "/v2/models/probe/explain",
        "/v2/models/probe/infer?a=1", "/v2/models/probe/infer/", "/v1/models/describing:explain", "/v2/models/describing/explain",
        "/invocations?model_name=probe&body=mine",
    ):  # fmt: skip
        yield Ask(f"POST {path}", kind=TEXT, body="hello")
    for path in ("/explanations/probe", "/invocations?model_name=probe", "/models/probe/invoke", "/probe/predict", "/v1/models/probe:predict", "/v2/models/probe/infer"):  # fmt: skip
        yield Ask(f"GET {path}")
        yield Ask(f"OPTIONS {path}")
    yield Ask("POST /invocations", "model in a form", kind=FORM, body="model_name=probe&a=1")
    yield Ask("POST /invocations", "model in JSON", kind=JSON, body='{"model_name": "probe"}')
    edge = "multipart/form-data; boundary=edge"
    yield Ask(
        "POST /invocations",
        "model in multipart",
        kind=edge,
        body=multipart(part("model_name", "probe"), part("data", "x")),
    )
    yield Ask(
        "POST /invocations",
        "model in a file part",
        kind=edge,
        body=multipart(part("model_name", "probe", "f", TEXT)),
    )
    yield Ask(
        "POST /invocations?model_name=lab",
        "query and form disagree",
        kind=FORM,
        body="model_name=probe",
    )
    yield Ask("POST /models/probe/invoke?a=1", "query and form", kind=FORM, body="a=2&b=3")
    yield Ask("POST /models/probe/invoke?a=1", "query and JSON", kind=JSON, body='{"a": 2}')
    yield manage("GET /v1/models/probe")
    yield manage("GET /models/describing?customized=true")
    yield manage("GET /models/describing/1.0?customized=true")
    yield manage("GET /models/describing?customized=TRUE")
    yield manage("GET /models/describing?customized=false")
    yield manage("GET /models/probe?customized=true", "a handler that knows no describe")
    for name in ("object", "list", "null", "text"):
        yield install(f"described-{name}")
        yield manage(f"GET /models/described-{name}?customized=true")
        yield manage(f"DELETE /models/described-{name}")
    yield install("described-badly")
    yield manage("GET /models/described-badly?customized=true", patience=10)
    yield manage("DELETE /models/described-badly")
    yield manage("OPTIONS /models/probe")
    yield manage("OPTIONS /models/probe/1.0")
    yield manage("OPTIONS /models/probe/1.0/set-default")


def streams() -> Iterator[Step]:
    """Answers in pieces."""
    yield install("stream")
    yield order("stream", '{"pieces": 0}')
    yield order("stream", '{"pieces": 1}')
    yield order("stream", '{"pieces": 3}')
    yield order(
        "stream", '{"pieces": 2, "headers": {"X-Mine": "one", "content-type": "text/event-stream"}}'
    )
    yield order("stream", '{"pieces": 2, "status": [201, "Made"]}')
    yield Ask("POST /v1/models/stream:predict", kind=JSON, body='{"pieces": 1}')
    yield Ask("POST /models/stream/invoke", kind=JSON, body='{"pieces": 1}')
    yield Ask("HEAD /predictions/stream", kind=JSON, body='{"pieces": 1}')
    yield order("stream", '{"pieces": 2, "fail": "raise"}')
    yield order("stream", '{"pieces": 1}', "after a failure")
    yield order("stream", '{"pieces": 2, "fail": "die"}')
    yield Ready("stream")
    yield order("stream", '{"pieces": 1}', "after a death")
    yield register(
        "url=stream.mar&model_name=stream2&batch_size=2&max_batch_delay=3000&initial_workers=1"
    )
    yield Together(
        "stream: a batch of two",
        [order("stream2", f'{{"pieces": 2, "name": "{n}"}}') for n in "ab"],
    )
    yield manage("DELETE /models/stream2")
    yield manage("DELETE /models/stream")
    yield register("url=continuous.mar")
    yield order("continuous", '{"until": 1}')
    yield order("continuous", '{"until": 3}')
    yield manage("DELETE /models/continuous")


def registrations() -> Iterator[Step]:
    """Every way to register, and what describe says of it."""
    yield register("url=wide.mar", "settings in the yaml")
    yield manage("GET /models/wide")
    yield manage("DELETE /models/wide")
    yield register(
        "url=wide.mar&batch_size=7&max_batch_delay=5&initial_workers=2&response_timeout=9&startup_timeout=99",
        "yaml and query",
    )
    yield manage("GET /models/wide", "yaml and query")
    yield manage("DELETE /models/wide")
    for name in ("narrow", "ticketed"):
        yield install(name)
        yield manage(f"GET /models/{name}")
        yield order(name, '{"answer": "served"}')
        yield manage(f"DELETE /models/{name}")
    yield register(
        "url=probe.mar&model_name=numbers&batch_size=7&max_batch_delay=5&response_timeout=9&startup_timeout=99"
    )
    yield manage("GET /models/numbers")
    yield manage("DELETE /models/numbers")
    yield register(
        "url=probe.mar&model_name=odd-numbers&batch_size=4.5&max_batch_delay=soon&initial_workers=many&response_timeout=-3&startup_timeout=0x10&synchronous=yes"
    )
    yield manage("GET /models/odd-numbers")
    yield manage("DELETE /models/odd-numbers")
    yield register(
        "url=probe.mar&model_name=zeroes&max_batch_delay=0&initial_workers=0&response_timeout=0&startup_timeout=0"
    )
    yield manage("GET /models/zeroes")
    yield manage("DELETE /models/zeroes")
    yield register("url=probe.mar&model_name=no-batch&batch_size=0")
    yield manage("GET /models/no-batch")
    yield manage("DELETE /models/no-batch")
    body = '{"url": "probe.mar", "model_name": "by-json", "batch_size": 4, "initial_workers": 1, "synchronous": true, "response_timeout": 7, "unknown": {}}'
    yield manage("POST /models?model_name=ignored", "JSON", kind=JSON, body=body)
    yield manage("GET /models/by-json")
    yield predict("by-json", note="registered by JSON")
    yield manage("DELETE /models/by-json")
    body = '{"url": "probe.mar", "model_name": "by-json", "batch_size": "4", "max_batch_delay": 50, "initial_workers": "0"}'
    yield manage(
        "POST /models", "JSON with numbers as text", kind=f"{JSON}; charset=utf-8", body=body
    )
    yield manage("GET /models/by-json", "numbers as text")
    yield manage("DELETE /models/by-json", "numbers as text")
    yield register("url=probe.mar&model_name=later&initial_workers=1&synchronous=false")
    yield Ready("later")
    yield predict("later", note="registered asynchronously")
    yield manage("DELETE /models/later")
    yield register(
        "url=probe.mar&model_name=other&handler=versions.py:handle&runtime=python3",
        "a handler that is not in the archive",
    )
    yield manage("GET /models/other")
    yield manage("DELETE /models/other")
    yield register("url=probe.mar&model_name=a%20b", "a name with a space")
    yield manage("GET /models/a%20b")
    yield manage("DELETE /models/a%20b")
    yield register("url={files}/versions-1.0.mar&model_name=by-url&initial_workers=1", "by URL")
    yield manage("GET /models/by-url")
    yield predict("by-url", note="registered by URL")
    yield register("url={files}/versions-1.0.mar&model_name=by-url2", "by URL, the file is there")
    yield manage("DELETE /models/by-url")
    yield register("url={files}/probe.mar&model_name=by-url3", "by URL, like a file of the store")
    yield register("url=file://{store}/probe.mar&model_name=by-file", "by file URL")
    yield manage("DELETE /models/by-file")
    for archive in (
        "rich-default.mar",
        "rich-zip-store.mar",
        "rich-tgz.tar.gz",
        "rich-no-archive",
        "renamed.tgz",
        "renamed.bin",
        "{store}/rich-no-archive",
    ):
        yield register(f"url={archive}&model_name=rich", archive)
        yield manage("GET /models/rich", archive)
        yield predict("rich", note=archive)
        yield manage("DELETE /models/rich", archive)
    yield register(
        "url=manifest-none.mar&handler=versions.py:handle&model_name=bare", "no manifest"
    )
    yield manage("GET /models/bare")
    yield manage("DELETE /models/bare")
    yield register(
        "url=sagemaker&handler=service.py:handle&initial_workers=1",
        "a directory without a manifest",
    )
    yield manage("GET /models/sagemaker")
    yield predict("sagemaker")
    yield manage("DELETE /models/sagemaker")
    yield register(
        "url=nested&handler=service.py:handle&initial_workers=1", "a directory in a directory"
    )
    yield manage("GET /models/nested")
    yield predict("nested")
    yield manage("DELETE /models/nested")
    yield register("url=manifest-no-archiver.mar", "no archiverVersion in the manifest")
    yield manage("DELETE /models/odd", "no archiverVersion in the manifest")


def failing_loads() -> Iterator[Step]:
    """Workers that do not come up."""
    for name in ("import", "memory", "cuda", "runtime", "exit", "value"):
        yield install(f"fails-{name}")
        yield manage(f"GET /models/fails-{name}", "after a failed load")
        yield manage(f"DELETE /models/fails-{name}", "after a failed load")
    yield register("url=fails-value.mar", "without workers")
    yield manage("PUT /models/fails-value?min_worker=1&synchronous=true")
    yield manage("PUT /models/fails-value/1.0?min_worker=1&synchronous=true")
    yield manage("DELETE /models/fails-value")


def versions_and_lists() -> Iterator[Step]:
    """Several versions; pages of the list; scaling; unregistering."""
    for version in ("1.0", "2.0", "beta"):
        yield register(f"url=versions-{version}.mar")
    yield manage("GET /models/versions")
    yield manage("GET /models/versions/2.0")
    yield manage("GET /models/versions/all")
    yield manage("GET /models/versions/")
    yield manage("PUT /models/versions/2.0?min_worker=1&synchronous=true")
    yield manage("PUT /models/versions?min_worker=1&synchronous=true&model_version=beta")
    yield predict("versions", note="default has no worker")
    yield predict("versions/2.0")
    yield predict("versions/beta")
    yield manage("PUT /models/versions/2.0/set-default")
    yield manage("PUT /models/versions/2.0/set-default/")
    yield predict("versions", note="default is 2.0")
    yield manage("DELETE /models/versions/2.0", "the default")
    yield manage("DELETE /models/versions", "the default")
    yield manage("DELETE /models/versions/1.0")
    yield manage("DELETE /models/versions/beta?synchronous=false&timeout=1")
    yield manage("GET /models/versions/all", "one is left")
    yield manage("DELETE /models/versions")
    yield predict("versions", note="unregistered")
    for number in range(5):
        yield register(f"url=probe.mar&model_name=m{number}")
    for query in ("", "limit=2", "limit=2&next_page_token=2", "limit=5&next_page_token=2", "limit=0", "limit=-1", "limit=101",
                  "limit=x", "limit=", "limit=100&next_page_token=100", "next_page_token=-5", "next_page_token=x", "limit=1&limit=2",
                  "limit=7", "limit=8", "limit=9", "limit=1&next_page_token=7"):  # fmt: skip
        yield manage(f"GET /models?{query}")
    for query in ("min_worker=-1", "min_worker=2&max_worker=1", "min_worker=one&max_worker=two", "max_worker=0",
                  "min_worker=0&max_worker=0&synchronous=true", "min_worker=0&synchronous=TRUE", "", "min_worker=1&max_worker=3&synchronous=true",
                  "min_worker=1&synchronous=true&number_gpu=1&timeout=5", "min_worker=0&synchronous=false"):  # fmt: skip
        yield manage(f"PUT /models/m1?{query}")
    yield manage("PUT /models/m2/1.0?min_worker=1&synchronous=true")
    yield manage("PUT /models/m2/1.0?min_worker=0&synchronous=true")
    yield manage("PUT /models/m2/1.0?min_worker=0")
    yield manage("GET /models/m2", "scaled to nothing")
    yield Ask("GET /ping", "a model scaled to nothing")
    for number in range(5):
        yield manage(f"DELETE /models/m{number}")
    yield manage("DELETE /models/m0", "twice")


def metrics_page() -> Iterator[Step]:
    """The metrics listener; what stands on the page is compared without its values."""
    for line in ("GET /metrics", "POST /metrics", "GET /metrics/deeper", "HEAD /metrics", "OPTIONS /metrics",
                 "GET /metrics?name[]=ts_inference_requests_total", "GET /metrics?name[]=nothing",
                 "GET /metrics?name%5B%5D=ts_inference_requests_total&name[]=ts_queue_latency_microseconds_total"):  # fmt: skip
        yield Ask(line, to="metrics")


def tokens() -> Iterator[Step]:
    """Authorization on, model control off, one model loaded at start."""
    yield Ask("GET /ping", headers={"Authorization": "Bearer {inference_key}"})
    yield Ask("GET /ping", "no key")
    for listener, path in (("inference", "/predictions/probe"), ("management", "/models/probe")):
        method = "POST" if listener == "inference" else "GET"
        for note, value in (
            ("inference key", "Bearer {inference_key}"), ("management key", "Bearer {management_key}"),
            ("API key", "Bearer {API_key}"), ("wrong key", "Bearer wrong"), ("empty", "Bearer "), ("no scheme", "{inference_key}"),
            ("lower case", "bearer {inference_key}"), ("two spaces", "Bearer   {inference_key}"), ("more", "Bearer {inference_key} x"),
            ("basic", "Basic {inference_key}"), ("quoted", 'Bearer "{inference_key}"'),
        ):  # fmt: skip
            yield Ask(f"{method} {path}", note, to=listener, headers={"Authorization": value})
        yield Ask(f"{method} {path}", "no key", to=listener)
    for listener in LISTENERS:
        yield Ask("OPTIONS /", to=listener)
        yield Ask("GET /", to=listener)
        yield Ask("GET /api-description", to=listener)
        yield Ask("GET /nowhere", "no key", to=listener)
    yield Ask("GET /nowhere", "inference key", headers={"Authorization": "Bearer {inference_key}"})
    yield Ask("OPTIONS /predictions/probe", "no key")
    yield Ask("GET /metrics", to="metrics")
    management = {"Authorization": "Bearer {management_key}"}
    for line in ("POST /models?url=probe.mar", "DELETE /models/probe", "PUT /models/probe?min_worker=1", "GET /models",
                 "GET /models/probe", "OPTIONS /models", "DELETE /models/nobody", "POST /models", "PUT /models/probe/1.0/set-default", "GET /v1/models/probe"):  # fmt: skip
        yield manage(line, "management key", headers=management)
        yield manage(line, "no key")
    inference = {"Authorization": "Bearer {inference_key}"}
    for path in (
        "/invocations",
        "/v1/models/probe:predict",
        "/v2/models/probe/infer",
        "/explanations/probe",
        "/models/probe/invoke",
        "/probe/predict",
    ):
        yield Ask(f"POST {path}", headers=inference, kind=TEXT, body="x")
        yield Ask(f"POST {path}", "no key", kind=TEXT, body="x")
    for query in (
        "type=inference",
        "type=management",
        "type=API",
        "type=",
        "",
        "type=other",
        "type=inference&type=management",
    ):
        for key in ("{API_key}", "{management_key}", "wrong"):
            yield manage(f"GET /token?{query}", key, headers={"Authorization": f"Bearer {key}"})
    yield manage("GET /token?type=inference", "no key")
    for method in ("POST", "DELETE", "HEAD"):
        yield manage(
            f"{method} /token?type=inference", headers={"Authorization": "Bearer {API_key}"}
        )
    yield Ask("GET /token?type=inference", "API key", headers={"Authorization": "Bearer {API_key}"})
    yield Ask("GET /ping", "the new key", headers=inference)
    yield manage("GET /models?x=/token", "the word token elsewhere", headers=management)


def shared_port() -> Iterator[Step]:
    """Inference and management at the same address."""
    yield install("probe")
    for line in (
        "GET /ping", "OPTIONS /", "GET /", "GET /api-description", "GET /models", "GET /models/probe", "GET /models/probe/1.0",
        "GET /models/probe/all", "PUT /models/probe?min_worker=1&synchronous=true", "PUT /models/probe/1.0?min_worker=1&synchronous=true",
        "PUT /models/probe/1.0/set-default", "POST /predictions/probe", "POST /models/probe/invoke", "POST /invocations?model_name=probe",
        "GET /metrics", "GET /v1/models/probe", "GET /v2", "POST /v1/models/probe:predict", "GET /workflows", "GET /nowhere",
        "GET /token?type=inference", "OPTIONS /models/probe", "OPTIONS /predictions/probe", "PATCH /models/probe", "DELETE /models/probe/1.0",
        "GET /models/probe/x/y", "DELETE /models/probe",
    ):  # fmt: skip
        yield Ask(line)
    yield Ask("GET /metrics", to="metrics")


def open_inference() -> Iterator[Step]:
    """Open Inference Protocol, CORS, undecoded inputs, the prometheus mode."""
    for line in ("GET /v2", "GET /v2/", "POST /v2", "OPTIONS /v2", "GET /v2/health/live", "GET /v2/health/ready", "POST /v2/health/live",
                 "GET /v2/health", "GET /v2/health/other", "GET /v2/models/probe", "GET /v2/models/probe/ready", "GET /v2/models",
                 "GET /v2/models/probe/versions/1.0", "GET /v2/models/probe/versions/1.0/ready", "POST /v2/models/probe/versions/1.0/infer",
                 "GET /v2/models/nobody/versions/1/ready", "GET /v2/other", "GET /v2/repository/index", "POST /v2/models/nobody/infer"):  # fmt: skip
        yield Ask(line)
    yield install("probe")
    yield Ask("GET /v2/models/probe", "registered")
    yield Ask("GET /v2/models/probe/ready", "registered")
    yield Ask("POST /v2/models/probe/infer", kind=JSON, body='{"inputs": []}')
    yield predict("probe", '{"a": 1}', JSON, "not decoded")
    yield predict("probe", "text", TEXT, "not decoded")
    yield predict(
        "probe",
        multipart(part("a", "[1]", "f", JSON)),
        "multipart/form-data; boundary=edge",
        "not decoded",
    )
    yield predict("nobody", note="CORS on an error")
    yield Ask(
        "OPTIONS /predictions/probe",
        "CORS preflight",
        headers={"Origin": "http://a.example", "Access-Control-Request-Method": "POST"},
    )
    yield manage("GET /models", headers={"Origin": "http://a.example"})
    yield install("lab")
    for name in ("access-control-allow-origin", "Access-Control-Allow-Origin"):
        yield order("lab", f'{{"headers": {{"{name}": "mine"}}}}')
    yield from metrics_page()


def patience() -> Iterator[Step]:
    """Timeouts, full queues, and what a model without a seat answers."""
    yield install("impatient")
    yield order("impatient", '{"do": "hang"}')
    yield Ready("impatient")
    yield order("impatient", '{"answer": "after"}', "after a hang")
    yield manage("DELETE /models/impatient")


def envelope(name: str, asks: Sequence[tuple[str, str, bytes | str]]) -> Setting:
    """Everything asked under one request envelope."""

    def steps() -> Iterator[Step]:
        yield install("increase")
        yield install("probe")
        for path, kind, body in asks:
            text = body if isinstance(body, str) else body.decode("latin-1")
            yield Ask(f"POST {path}", text, kind=kind, body=body)

    return Setting(f"envelope {name}", {**OPEN, "service_envelope": name}, list(steps()))


PREDICT = "/predictions/increase"
ENVELOPES = (
    envelope("body", [
        (PREDICT, JSON, "[1, 2]"), (PREDICT, JSON, "7"), (PREDICT, FORM, "data=x&other=y"), (PREDICT, TEXT, "text"),
        ("/predictions/probe", OCTETS, b"raw"), ("/v1/models/increase:predict", JSON, "[1]"), ("/explanations/increase", JSON, "[1]"),
    ]),
    envelope("json", [
        (PREDICT, JSON, '{"instances": [1, 2]}'), (PREDICT, JSON, '{"instances": []}'), (PREDICT, JSON, '{"other": 1}'),
        (PREDICT, JSON, '{"instances": [{"b64": "YWJj"}]}'), ("/v1/models/increase:predict", JSON, '{"instances": [[1], [2, 3]]}'),
        ("/v1/models/increase:explain", JSON, '{"instances": [1]}'), (PREDICT, TEXT, "text"), (PREDICT, OCTETS, '{"instances": [1, 2]}'),
    ]),
    envelope("kserve", [
        ("/v1/models/increase:predict", JSON, '{"instances": [1, 2]}'), ("/v1/models/increase:explain", JSON, '{"instances": [1, 2]}'),
        ("/v1/models/increase:predict", JSON, '{"other": 1}'), ("/v1/models/increase:predict", OCTETS, '{"instances": [1]}'),
        (PREDICT, JSON, '{"instances": [[1.5]]}'), ("/v1/models/increase:predict", JSON, "{broken"),
    ]),
    envelope("kservev2", [
        ("/v2/models/increase/infer", JSON, '{"id": "mine", "inputs": [{"name": "i", "shape": [2], "datatype": "INT64", "data": [1, 2]}]}'),
        ("/v2/models/increase/infer", JSON, '{"inputs": [{"name": "i", "shape": [2, 1], "datatype": "FP32", "data": [1.5, 2]}]}'),
        ("/v2/models/increase/infer", JSON, '{"inputs": [{"name": "i", "shape": [1], "datatype": "BYTES", "data": ["text"]}]}'),
        ("/v2/models/increase/infer", JSON, '{"inputs": [{"name": "i", "shape": [1], "datatype": "BOOL", "data": [true]}, {"name": "j", "shape": [1], "datatype": "INT32", "data": [5]}]}'),
        ("/v2/models/increase/infer", JSON, '{"inputs": []}'), ("/v2/models/increase/infer", JSON, '{"other": 1}'),
        ("/v2/models/increase/explain", JSON, '{"inputs": [{"name": "i", "shape": [1], "datatype": "INT64", "data": [1]}]}'),
        (PREDICT, JSON, '{"inputs": [{"name": "i", "shape": [1], "datatype": "INT64", "data": [1]}]}'),
    ]),
)  # fmt: skip


def main_steps() -> Iterator[Step]:
    """In an order where later questions find what earlier ones left."""
    yield from empty_server()
    yield from refused_registrations()
    yield from without_workers()
    yield from unknown_models()
    yield from inputs()
    yield install("lab")
    yield from limits()
    yield from results()
    yield from batches()
    yield from other_routes()
    yield from streams()
    yield from registrations()
    yield from failing_loads()
    yield from versions_and_lists()
    yield from patience()
    yield from metrics_page()


SAGEMAKER = {
    **OPEN, "default_service_handler": "service.py:handle", "load_models": "sagemaker,mine=nested", "default_workers_per_model": "1",
}  # fmt: skip

SETTINGS: Sequence[Setting] = (
    Setting("main", {**OPEN, "max_request_size": str(LIMIT)}, list(main_steps())),
    Setting(
        "tokens",
        {
            "enable_model_api": "false",
            "disable_token_authorization": "false",
            "load_models": "probe.mar",
            "default_workers_per_model": "1",
        },
        [Ready("probe"), *tokens()],
    ),
    Setting("shared port", OPEN, list(shared_port()), shared_port=True),
    Setting(
        "open inference",
        {
            **OPEN,
            "ts_open_inference_protocol": "true",
            "cors_allowed_origin": "http://a.example",
            "cors_allowed_methods": "GET, POST",
            "cors_allowed_headers": "X-One",
            "decode_input_request": "false",
            "metrics_mode": "prometheus",
        },
        list(open_inference()),
    ),
    Setting(
        "sagemaker",
        SAGEMAKER,
        [
            Ready("sagemaker"),
            Ready("mine"),
            manage("GET /models"),
            manage("GET /models/sagemaker"),
            predict("sagemaker"),
            predict("mine"),
            Ask("POST /invocations", "two models at start", body=b"x"),
        ],
    ),
    *ENVELOPES,
)
