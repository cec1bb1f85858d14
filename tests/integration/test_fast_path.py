"""A client sees no difference between the two ways of a request, the fast path and aiohttp's.

A request that comes first goes the fast path, if it is plain; one that comes with another in front
of it goes aiohttp's way.
"""

import json
import re

import pytest

pytestmark = pytest.mark.integration

LIMIT = 10_000
FORM = "Content-Type: application/x-www-form-urlencoded"
COUNTED = (
    "Requests2XX",
    "Requests4XX",
    "Requests5XX",
    "ts_inference_requests_total",
    "marserve_rejected_requests_total",
)
PING = b"GET /ping HTTP/1.1\r\nHost: h\r\n\r\n"
LAST = b"GET /ping HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"
PINGED = re.compile(rb'HTTP/1\.1 200 OK\r\n.*?"Healthy"\n}\n', re.DOTALL)
ID = re.compile(rb"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")


@pytest.fixture(scope="module")
def server(start_server, handlers):
    with start_server(max_request_size=str(LIMIT), cors_allowed_origin="*") as server:
        server.install(handlers / "probe.py", "probe")
        server.install(handlers / "probe.py", "engine", "openai: server\n")
        server.install(handlers / "lab.py", "lab")
        server.install(handlers / "lab.py", "idle", initial_workers=0)
        yield server


def request(target, body=b"hello", *headers, method="POST"):
    length = [f"Content-Length: {len(body)}"] if body is not None else []
    lines = [f"{method} {target} HTTP/1.1", "Host: h", *length, *headers]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + (body or b"")


def probe(*headers, body=b"hello", **options):
    return request("/predictions/probe", body, *headers, **options)


def lab(**orders):
    body = json.dumps({"answer": "fine", **orders}).encode()
    return request("/predictions/lab", body, "Content-Type: application/json")


REQUESTS = {
    "plain": probe(),
    "empty": probe(body=b""),
    "without a length": probe(body=None),
    "PUT": probe(method="PUT"),
    "GET with a body": probe(method="GET"),
    "GET": probe(method="GET", body=None),
    "unknown method": probe(method="PURGE"),
    "OPTIONS": probe(method="OPTIONS"),
    "JSON": probe("Content-Type: application/json; charset=utf-8", body=b'{"a": 1}'),
    "broken JSON": probe("Content-Type: application/json", body=b'{"a": '),
    "text": probe("Content-Type: text/plain", body="ä".encode()),
    "form": probe(FORM, body=b"a=1&b=2"),
    "FORM": probe("content-type: Application/X-WWW-Form-URLencoded ;x=y", body=b"a=1"),
    "multipart without a boundary": probe("Content-Type: multipart/form-data"),
    "chunked": probe("Transfer-Encoding: chunked", body=None) + b"2\r\nhi\r\n0\r\n\r\n",
    "compressed": probe("Content-Encoding: gzip"),
    "expectation": probe("Expect: 100-continue"),
    "another expectation": probe("Expect: nothing"),
    "header twice": probe("X-A: 1", "x-a: 2", "X-A: 3"),
    "header beyond ASCII": probe("X-A: \xe4\xf6", "X-B: \xc3\xa4"),
    "describe": probe("describe: True"),
    "explain": probe("explain: True", "url_path: mine"),
    "priority": probe("X-Priority: LOW", "X-Timeout-Ms: 20000"),
    "HTTP/1.0": probe().replace(b"HTTP/1.1", b"HTTP/1.0"),
    "keep-alive": probe("Connection: keep-alive"),
    "to be closed": probe("Connection: close"),
    "version": request("/predictions/probe/1.0"),
    "path behind": request("/predictions/probe/1.0/further"),
    "slash behind": request("/predictions/probe//"),
    "query": request("/predictions/probe?a=b&c"),
    "escapes": request("/pr%65dictions/pr%6fbe"),
    "absolute": request("http://h/predictions/probe"),
    "OpenAI": request("/v1/chat/completions", b'{"model": "engine"}'),
    "OpenAI by version": request("/v1/embeddings", b'{"model": "engine:1.0"}'),
    "OpenAI, a form": request("/v1/completions", b"model=engine", FORM),
    "OpenAI, unknown model": request("/v1/chat/completions", b'{"model": "nobody"}'),
    "OpenAI, another model": request("/v1/chat/completions", b'{"model": "probe"}'),
    "OpenAI, no JSON": request("/v1/responses", b"model"),
    "OpenAI, PUT": request("/v1/rerank", b'{"model": "engine"}', method="PUT"),
    "OpenAI, too large": request("/v1/completions", b"x" * (LIMIT + 1)),
    "explanation": request("/explanations/probe"),
    "unknown model": request("/predictions/nobody"),
    "unknown version": request("/predictions/probe/9"),
    "no model": request("/predictions"),
    "no model but a version": request("/predictions//1.0"),
    "control character": request("/predictions/%01%ff"),
    "no worker": request("/predictions/idle"),
    "no worker of the version": request("/predictions/idle/1.0"),
    "too large": probe(body=b"x" * (LIMIT + 1)),
    "as large as allowed": probe(body=b"x" * LIMIT),
    "bad timeout": probe("X-Timeout-Ms: soon"),
    "bad priority": probe("X-Priority: highest"),
    "status": lab(status=[201, "Made"]),
    "no content": lab(status=[204, ""]),
    "not modified": lab(status=[304, "Not Modified"]),
    "teapot": lab(status=[418, "Teapot"]),
    "impossible status": lab(status=[99, "x"]),
    "impossible phrase": lab(status=[200, "a\r\nb"]),
    "headers": lab(headers={"x-mine": "ä", "Connection": "close"}, type="text/x"),
    "header beyond Latin-1": lab(headers={"x-mine": "日"}),
    "impossible header": lab(headers={"a b": "c"}),
    "broken header": lab(headers={"a": "b\r\nc: d"}),
    "large answer": lab(answer="y" * 500_000),
    "raises": lab(do="raise"),
    "refuses": lab(do="refuse", message="not you", code=451),
    "too few": lab(do="too few"),
}


def exchange(server, sent):
    """Send bytes, and after the first answer a last request; all that came, without ids."""
    with server.connect("inference") as connection:
        connection.sendall(sent)
        received = bytearray(connection.recv(65536))
        try:
            connection.sendall(LAST)
            while chunk := connection.recv(65536):
                received += chunk
        except ConnectionError:  # it was closed behind the answer
            pass
    return ID.sub(b"ID", received)


def without_ping(received):
    first = PINGED.match(received)
    assert first, received
    return received[first.end() :]


def both_ways(server, sent):
    return exchange(server, sent), without_ping(exchange(server, PING + sent))


@pytest.mark.parametrize("name", REQUESTS)
def test_the_answer_is_the_same(server, name):
    fast, ordinary = both_ways(server, REQUESTS[name])
    assert fast == ordinary
    assert fast.startswith(b"HTTP/1.")


def test_requests_are_counted_and_logged_alike(server):
    def records(mark, before):
        """What all requests add to the metrics and to the log, sent behind something or alone."""
        counted = server.metrics(*COUNTED)
        exchange(server, request(f"/predictions/begin-{mark}"))
        pings = sum(len(PINGED.findall(exchange(server, before + it))) for it in REQUESTS.values())
        exchange(server, request(f"/predictions/end-{mark}"))
        changes = {
            key: value - counted.get(key, 0) for key, value in server.metrics(*COUNTED).items()
        }
        changes = {key: n - pings if "2XX" in key else n for key, n in changes.items()}
        server.wait_logged("access_log.log", f"end-{mark}")
        lines = server.log("access_log.log").splitlines()
        begin, end = (
            next(place for place, line in enumerate(lines) if f"{word}-{mark}" in line)
            for word in ("begin", "end")
        )
        answers = [line[line.index('"') : line.rindex(" ")] for line in lines[begin + 1 : end]]
        return changes, [line for line in answers if "/ping " not in line]

    records("once", b"")  # so that every series is there
    fast, ordinary = records("fast", b""), records("ordinary", PING)
    assert fast == ordinary
    assert len(fast[1]) == len(REQUESTS)
    assert all(fast[0].values())


def test_a_server_that_stops_answers_what_is_under_way(start_server, handlers, make_gate):
    gate = make_gate()
    body = json.dumps({"answer": "fine", "gate": gate.path}).encode()
    with start_server() as server:
        server.install(handlers / "lab.py", "lab")
        with server.connect("inference") as connection:
            connection.sendall(request("/predictions/lab", body, "Content-Type: application/json"))
            gate.wait_entered()
            server.terminate()
            gate.open()
            received = bytearray()
            while chunk := connection.recv(65536):
                received += chunk
        assert received.startswith(b"HTTP/1.1 200 \r\n")
        assert received.endswith(b"\r\n\r\nfine")
        server.wait_stopped()
