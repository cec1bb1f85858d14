"""Requests that cannot be served: each gets its answer, and the server goes on."""

import json
import socket

import pytest

pytestmark = pytest.mark.integration

LIMIT = 10_000
NOT_FOUND = "Requested resource is not found, please refer to API document."
NOT_ALLOWED = "Requested method is not allowed, please refer to API document."


@pytest.fixture(scope="module")
def server(start_server, handlers):
    with start_server(max_request_size=str(LIMIT)) as server:
        server.install(handlers / "probe.py", "probe")
        yield server


@pytest.fixture(autouse=True)
def still_serves(server):
    yield
    assert server.predict("probe", data=b"still there").status_code == 200
    assert [worker["status"] for worker in server.describe("probe")["workers"]] == ["READY"]


def error(answer):
    return answer.status_code, answer.json()["type"], answer.json()["message"]


@pytest.mark.parametrize(
    ("path", "kind", "message"),
    [
        ("/predictions/nobody", "ModelNotFoundException", "Model not found: nobody"),
        ("/predictions/nobody/1.0", "ModelNotFoundException", "Model not found: nobody"),
        (
            "/predictions/probe/9.9",
            "ModelVersionNotFoundException",
            "Model version: 9.9 does not exist for model: probe",
        ),
        ("/predictions", "ResourceNotFoundException", NOT_FOUND),
        ("/predictions/", "ResourceNotFoundException", NOT_FOUND),
        ("/nowhere", "ResourceNotFoundException", NOT_FOUND),
        ("/models/probe", "ResourceNotFoundException", NOT_FOUND),
        ("/metrics", "ResourceNotFoundException", NOT_FOUND),
        ("/predictions/%ff%fe", "ModelNotFoundException", None),
        ("/predictions/..%2f..%2fetc%2fpasswd", "ModelNotFoundException", None),
    ],
)
def test_not_found_on_the_inference_listener(server, path, kind, message):
    status, found_kind, found_message = error(server.inference("POST", path, data=b"x"))
    assert (status, found_kind) == (404, kind)
    assert message is None or found_message == message


@pytest.mark.parametrize("path", ["/models/nobody", "/models/nobody/1.0", "/models/nobody/all"])
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_unknown_model_on_the_management_listener(server, method, path):
    status, kind, message = error(server.management(method, path))
    if path.endswith("all") and method != "GET":
        assert status == 404
    else:
        assert (status, kind, message) == (
            404,
            "ModelNotFoundException",
            "Model not found: nobody",
        )


@pytest.mark.parametrize(
    ("method", "path", "message"),
    [
        ("GET", "/models/probe/9", "Model version: 9 does not exist for model: probe"),
        ("PUT", "/models/probe/9", "Model version: 9 does not exist for model: probe"),
        ("DELETE", "/models/probe/9", "Model version: 9 does not exist for model: probe"),
        ("PUT", "/models/probe/9/set-default", "Model version 9 does not exist for model probe"),
    ],
)
def test_unknown_version_on_the_management_listener(server, method, path, message):
    answer = error(server.management(method, path))
    assert answer == (404, "ModelVersionNotFoundException", message)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("PUT", "/models"),
        ("DELETE", "/models"),
        ("PATCH", "/models"),
        ("POST", "/models/probe"),
        ("PATCH", "/models/probe"),
        ("POST", "/models/probe/1.0"),
        ("GET", "/models/probe/1.0/set-default"),
        ("DELETE", "/models/probe/1.0/set-default"),
    ],
)
def test_wrong_method(server, method, path):
    answer = error(server.management(method, path))
    assert answer == (405, "MethodNotAllowedException", NOT_ALLOWED)


@pytest.mark.parametrize("path", ["/models/a/b/c", "/predictions/probe", "/ping"])
def test_not_found_on_the_management_listener(server, path):
    assert error(server.management("GET", path))[:2] == (404, "ResourceNotFoundException")


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ({"min_worker": -1}, 400),
        ({"min_worker": 2, "max_worker": 1}, 400),
        ({"min_worker": "one", "max_worker": "two"}, 202),  # counts as not given
        ({"min_worker": "1e3", "max_worker": ""}, 400),
        ({"min_worker": "9" * 5000, "max_worker": "1"}, 400),
        ({"min_worker": 2**64, "max_worker": 1}, 400),
        ({"min_worker": 1001}, 400),
    ],
)
def test_malformed_numbers_when_scaling(server, query, status):
    answer = server.management("PUT", "/models/probe", params=query)
    assert answer.status_code == status, answer.text
    assert server.describe("probe")["minWorkers"] == 1


@pytest.mark.parametrize(
    "query",
    ["limit=x", "limit=", "limit=-1", "limit=1e9", "next_page_token=x", "next_page_token=-5"],
)
def test_malformed_numbers_when_listing(server, query):
    answer = server.management("GET", f"/models?{query}")
    assert [model["modelName"] for model in answer.json()["models"]] == ["probe"]


def test_malformed_numbers_when_registering(server, handlers):
    server.install(
        handlers / "probe.py",
        "odd",
        initial_workers="many",
        batch_size="four",
        max_batch_delay="soon",
        response_timeout="-1",
        startup_timeout="0x10",
    )
    odd = server.describe("odd")
    assert (odd["batchSize"], odd["maxBatchDelay"], odd["workers"]) == (1, 100, [])
    assert (odd["responseTimeout"], odd["startupTimeout"]) == (120, 120)
    assert server.management("DELETE", "/models/odd").status_code == 200


@pytest.mark.parametrize(
    ("name", "value"), [("batch_size", "4.5"), ("response_timeout", "-3"), ("startup_timeout", "0")]
)
def test_numbers_that_make_no_sense_when_registering(server, name, value):
    answer = server.register("probe.mar", model_name="odd", **{name: value})
    assert error(answer)[:2] == (400, "BadRequestException")
    assert error(answer)[2].startswith(f"{name}={value}: ")
    assert not server.is_known("odd")


# Bodies


def test_a_body_of_exactly_the_limit(server):
    assert server.predict("probe", data=b"x" * LIMIT).status_code == 200


@pytest.mark.parametrize("listener", ["inference", "management"])
@pytest.mark.parametrize(
    "body",
    [
        b"Content-Length: %d\r\n\r\n%b" % (LIMIT + 1, b"x" * (LIMIT + 1)),
        b"Content-Length: 999999999999999\r\n\r\n",
        b"Content-Length: %d\r\nExpect: 100-continue\r\n\r\n" % (LIMIT + 1),
        b"Transfer-Encoding: chunked\r\n\r\n2711\r\n%b\r\n0\r\n\r\n" % (b"x" * (LIMIT + 1)),
        b"Transfer-Encoding: chunked\r\n\r\n" + b"1000\r\n%b\r\n" % (b"x" * 4096) * 4,
    ],
)
def test_an_oversized_body(server, listener, body):
    path = {"inference": b"/predictions/probe", "management": b"/models?url=x.mar"}[listener]
    request = b"POST %b HTTP/1.1\r\nHost: 127.0.0.1\r\n%b" % (path, body)
    head, _, rest = server.exchange(listener, request, until=b"\n}\n").partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 413 Request Entity Too Large\r\n")
    assert b"connection: close" in head
    assert json.loads(rest)["message"].endswith(f"longer than max_request_size ({LIMIT} bytes).")


@pytest.mark.parametrize(
    "truncated",
    [
        b"Content-Length: 100\r\n\r\nonly this",
        b"Transfer-Encoding: chunked\r\n\r\n64\r\nonly this",
        b"Transfer-Encoding: chunked\r\n\r\n4\r\nthis\r\n",
    ],
)
def test_a_truncated_body_never_reaches_the_handler(server, truncated, read_to_end):
    before = server.metrics("ts_inference_requests_total")
    request = b"POST /predictions/probe HTTP/1.1\r\nHost: 127.0.0.1\r\n%b" % truncated
    with server.connect("inference") as connection:
        connection.sendall(request)
        connection.shutdown(socket.SHUT_WR)
        answer = read_to_end(connection)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 400 ")
    assert server.metrics("ts_inference_requests_total") == before


@pytest.mark.parametrize(
    "request_",
    [
        b"no http at all\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # a TLS client
        b"GET /ping HTTP/9.9\r\n\r\n",
        b"GET /ping HTTP/1.1\r\nno colon\r\n\r\n",
        b"GET /%b HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" % (b"a" * 100_000),
        b"GET /ping HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Long: %b\r\n\r\n" % (b"a" * 100_000),
        b"POST /ping HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: minus\r\n\r\n",
        b"POST /predictions/probe HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %b3\r\n\r\nabc"
        % (b"0" * 4400),  # more digits than Python's int() takes
        b"GET /ping HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %b\r\n\r\n" % (b"0" * 4400),
        b"POST /ping HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 3\r\n"
        b"Content-Length: 4\r\n\r\nabcd",
        b"POST /ping HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 3\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ],
)
def test_what_is_no_http(server, request_):
    before = server.console_text()
    for listener in server.ports:
        answer = server.exchange(listener, request_)
        assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n")
        assert b'"type": "BadRequestException",\n  "message": "Invalid HTTP message: ' in answer
    assert "Traceback" not in server.console_text()[len(before) :]


@pytest.mark.parametrize("method", [b"GET", b"HEAD", b"OPTIONS"])
@pytest.mark.parametrize("path", [b"/ping", b"/ready"])
def test_a_probe_of_a_balancer_without_host(server, method, path):
    probe = b"%b %b HTTP/1.1\r\n\r\n" % (method, path)
    assert server.exchange("inference", probe, until=b"\r\n\r\n").startswith(b"HTTP/1.1 200 ")


def test_a_content_type_that_is_sent_twice(server):
    head = b"POST /predictions/probe HTTP/1.1\r\nHost: h\r\nConnection: close\r\n"
    for types, status in (((b"a/b", b"a/b"), b"200"), ((b"a/b", b"a/c"), b"400")):
        lines = b"".join(b"Content-Type: %b\r\n" % each for each in types)
        answer = server.exchange("inference", head + lines + b"Content-Length: 1\r\n\r\nx")
        assert answer.startswith(b"HTTP/1.1 %b " % status)
    server.wait_logged("access_log.log", '"POST /predictions/probe HTTP/1.1" 400')


@pytest.mark.parametrize(
    "broken",
    [
        b"zz\r\nxx\r\n0\r\n\r\n",
        b"5\r\nhelloNOT A CHUNK",
        b"-1\r\n\r\n",
    ],
)
def test_broken_chunks(server, broken):
    head = (
        b"POST /predictions/probe HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    answer = server.exchange("inference", head + broken)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b'"type": "BadRequestException"' in answer


def test_a_broken_escape_in_a_form(server):
    kind = {"Content-Type": "application/x-www-form-urlencoded"}
    answer = server.predict("probe", data=b"a=%zz", headers=kind)
    assert error(answer)[:2] == (400, "BadRequestException")


def test_a_broken_head_of_a_part_does_not_fill_the_console(server):
    before = server.console_text()
    part = "--b0\r\nContent-Disposition: form-data; name=a; filename*=utf-8''%ff\r\n\r\nx\r\n"
    kind = {"Content-Type": "multipart/form-data; boundary=b0"}
    assert server.predict("probe", data=f"{part}--b0--\r\n", headers=kind).status_code == 200
    assert server.console_text() == before


def test_a_client_that_sends_slowly_does_not_hold_the_others(server):
    with server.connect("inference") as slow:
        slow.sendall(
            b"POST /predictions/probe HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 4\r\n\r\nab"
        )
        assert server.predict("probe", data=b"fast").status_code == 200
        slow.sendall(b"cd")
        assert b'"abcd"' in slow.recv(65536)


# Registrations


@pytest.mark.parametrize(
    ("query", "status", "kind", "message"),
    [
        ({}, 400, "BadRequestException", "Parameter url is required."),
        ({"url": ""}, 404, "ModelNotFoundException", "empty url"),
        ({"url": "no.mar"}, 404, "ModelNotFoundException", "Model not found at: no.mar"),
        (
            {"url": "../no.mar"},
            404,
            "ModelNotFoundException",
            "Relative path is not allowed in url: ../no.mar",
        ),
        ({"url": "%2e%2e/no.mar"}, 404, "ModelNotFoundException", None),
        ({"url": "/etc/passwd"}, 404, "ModelNotFoundException", "Model not found at: /etc/passwd"),
        ({"url": "s3://b/no.mar"}, 404, "ModelNotFoundException", None),
        ({"url": "x" * 5000}, 404, "ModelNotFoundException", None),
        ({"url": "no\0.mar"}, 404, "ModelNotFoundException", None),
        (
            {"url": "x.mar", "runtime": "java"},
            400,
            "BadRequestException",
            "Invalid RuntimeType value: java",
        ),
        (
            {"url": "file:///no/such.mar"},
            400,
            "DownloadArchiveException",
            "Failed to download archive from: file:///no/such.mar: No such file or directory.",
        ),
        *(
            (
                {"url": url},
                400,
                "DownloadArchiveException",
                f"Failed to download archive from: {url}: the URL is malformed.",
            )
            for url in (
                "http://localhost:aaaa",
                "https://localhost:99999/m.mar",
                "http://[zz]/m.mar",
                "http://[::1/m.mar",
                "http:///m.mar",
                "http://:80",
                "http://h/\0m.mar",
            )
        ),
    ],
)
def test_a_registration_that_cannot_be(server, query, status, kind, message):
    answer = error(server.management("POST", "/models", params=query))
    assert answer[:2] == (status, kind)
    assert message is None or answer[2] == message
    if kind == "DownloadArchiveException":
        assert error(server.management("POST", "/workflows", params=query)) == answer


@pytest.mark.parametrize("member", ["url", "model_name", "handler", "nobodys", "batch_size"])
def test_half_a_surrogate_pair_in_a_body_is_refused(server, member):
    for document in ({member: "\ud800"}, {"url": "no.mar", member: [{"\udfff": 1}]}):
        for path in ("/models", "/workflows"):
            answer = error(server.management("POST", path, json=document))
            assert answer[:2] == (400, "BadRequestException")
            assert "surrogates not allowed" in answer[2]


def test_nobody_writes_lines_of_their_own_into_the_log(server):
    server.management("POST", "/models", params={"url": "no.mar\n2026-11-20 [ERROR] forged\x1b[2J"})
    server.wait_logged("ts_log.log", r"no.mar\n2026-11-20 [ERROR] forged\x1b[2J")


@pytest.mark.parametrize("body", [b"{broken", b"[]", b"null", b"", b"\xff", b"[" * 9000])
def test_a_registration_whose_json_is_none(server, body):
    json_type = {"Content-Type": "application/json"}
    answer = server.management("POST", "/models", data=body, headers=json_type)
    assert error(answer)[:2] == (400, "BadRequestException")
