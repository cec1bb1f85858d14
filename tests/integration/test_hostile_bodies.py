"""Bodies that take long to parse: whoever sends them waits, everybody else does not."""

import contextlib
import gzip
import select
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

pytestmark = pytest.mark.integration

SIZE = 6_500_000  # near the default of max_request_size
FORM = "application/x-www-form-urlencoded"
MULTIPART = "multipart/form-data; boundary=b0"
JSON = "application/json"
# Generous, for busy machines: where the body was parsed in one go, it took seconds.
WORST_PING = 0.7


def multipart(*parts):
    whole = b"".join(b"--b0\r\n%b\r\n\r\n%b\r\n" % part for part in parts)
    return whole + b"--b0--\r\n"


def disposition(number, more=b""):
    return b'Content-Disposition: form-data; name="a%d"%b' % (number, more)


def parameters(count):
    return b"".join(b";p%d=1" % number for number in range(count))


BODIES = {
    "many fields": (FORM, b"&".join(b"k%d=1" % n for n in range(SIZE // 10)), 400),
    "escapes": (FORM, b"a=" + b"%41" * (SIZE // 3), 200),
    "many parts": (MULTIPART, multipart(*((disposition(n), b"") for n in range(90_000))), 400),
    "many parameters": (
        MULTIPART,
        multipart(*((disposition(n, parameters(600)), b"v") for n in range(900))),
        200,
    ),
    "one long head": (MULTIPART, multipart((disposition(1, parameters(500_000)), b"v")), 400),
    "a list of brackets": (JSON, b"[[" + b"[]," * (SIZE // 3) + b"1]]", 200),
    "a list of a million items": (JSON, b"[" + b"1," * (SIZE // 2 - 1) + b"1]", 413),
}


class Pings:
    """Asks for /ping again and again, and notes how long the slowest took."""

    def __init__(self, server):
        self.worst = 0.0
        self._server = server
        self._ended = threading.Event()

    @contextlib.contextmanager
    def running(self):
        with ThreadPoolExecutor(1) as pool:
            asking = pool.submit(self._ask)
            try:
                yield
            finally:
                self._ended.set()
                asking.result()

    def _ask(self):
        with self._server.connect("inference") as connection:
            while not self._ended.wait(0.002):
                began = time.monotonic()
                connection.sendall(b"GET /ping HTTP/1.1\r\nHost: h\r\n\r\n")
                assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
                self.worst = max(self.worst, time.monotonic() - began)


@pytest.fixture(scope="module")
def model(server, make_archive):
    code = "def handle(data, context):\n    return data and [str(len(row)) for row in data]\n"
    make_archive(server.store, code, "hostile", config="dynamicBatchSize: true\n")
    answer = server.register("hostile.mar", initial_workers=1, synchronous="true")
    assert answer.status_code == 200, answer.text
    return "hostile"


@pytest.mark.parametrize("kind", BODIES)
def test_a_body_that_takes_long_to_parse_keeps_nobody_else_waiting(server, model, kind):
    content_type, body, status = BODIES[kind]
    pings = Pings(server)
    with pings.running(), ThreadPoolExecutor(8) as pool:
        answers = [
            pool.submit(server.predict, model, data=body, headers={"content-type": content_type})
            for _ in range(4)
        ]
        assert [answer.result().status_code for answer in answers] == [status] * 4
    assert pings.worst < WORST_PING


ENCODED = {
    "blanks": (gzip.compress(b" " * (SIZE - 1)), 200, 400),
    "a bomb": (gzip.compress(bytes(40 * SIZE)), 413, 413),
    "many members": (gzip.compress(b"") * (SIZE // 100), 200, 400),
}


@pytest.mark.parametrize("kind", ENCODED)
@pytest.mark.usefixtures("model")
def test_a_body_that_takes_long_to_decode_keeps_nobody_else_waiting(server, kind):
    body, passed_on, of_openai = ENCODED[kind]
    statuses = {"/v2/models/hostile/infer": passed_on, "/v1/embeddings": of_openai}
    pings, headers = Pings(server), {"content-type": JSON, "content-encoding": "gzip"}
    with pings.running(), ThreadPoolExecutor(4) as pool:
        answers = [
            (pool.submit(server.inference, "POST", path, data=body, headers=headers), status)
            for path, status in [*statuses.items()] * 2
        ]
        for answer, status in answers:
            assert answer.result().status_code == status
    assert pings.worst < WORST_PING


@pytest.mark.parametrize("content_type", [FORM, JSON])
def test_a_model_that_cannot_answer_says_so_before_the_body_comes(
    server, make_archive, content_type
):
    make_archive(server.store, "def handle(data, context):\n    return data\n", "idle")
    server.register("idle.mar", initial_workers=0)
    with server.connect("inference") as connection:
        head = f"POST /predictions/idle HTTP/1.1\r\nHost: h\r\nContent-Type: {content_type}\r\n"
        connection.sendall(head.encode() + b"Content-Length: 6000000\r\n\r\nx")
        assert connection.recv(65536).startswith(b"HTTP/1.1 503 ")


def test_what_a_form_may_have_is_configured(start_server):
    with start_server(max_form_parts="3", max_part_header_size="100") as server:
        assert message(server, FORM, b"a=1&b=2&c=3&d=4") == "The form has more than 3 fields."
        assert message(server, FORM, b"a" * 101 + b"=1") == (
            "A form field has a name of more than 100 bytes."
        )
        four = multipart(*((disposition(number), b"") for number in range(4)))
        assert message(server, MULTIPART, four) == "The multipart body has more than 3 parts."
        long = multipart((disposition(1, parameters(20)), b""))
        assert "longer than 100 bytes" in message(server, MULTIPART, long)


def message(server, content_type, body):
    """Why a form is refused; the path names no model, so that the form is read first."""
    headers = {"content-type": content_type}
    answer = server.inference("POST", "/invocations", data=body, headers=headers)
    assert answer.status_code == 400
    return answer.json()["message"]


def test_a_page_of_metrics_does_not_take_turns_with_each_body_of_clients(
    start_server, make_archive
):
    """With 80 such clients a scrape took 6 s."""
    form = b"a=" + b"%41" * 300_000
    kind = b"application/x-www-form-urlencoded"
    head = (
        b"POST /predictions/m HTTP/1.1\r\nHost: x\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n"
    )
    with start_server() as server, contextlib.ExitStack() as opened:
        archive = make_archive(server.store, "def handle(data, context): return data", "m")
        for name in ("m", *map(str, range(40))):
            server.register(archive, model_name=name, initial_workers=int(name == "m"))
        clients = [opened.enter_context(server.connect("inference")) for _ in range(25)]
        for client in clients:
            client.sendall(head % (kind, len(form)) + form)
        pages = 0
        while not select.select(clients, [], [], 0)[0]:
            server.metrics()
            pages += 1
        assert pages > 20
