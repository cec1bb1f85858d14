import gzip

import fakes
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from urllib3 import encode_multipart_formdata

from marserve.backend.protocol import Input
from marserve.frontend.http.request_bodies import read_body, read_input
from marserve.frontend.http.requests import HttpRequest
from marserve.frontend.http.responses import HttpResponse
from marserve.frontend.http.router import Route
from marserve.frontend.operations.predictions import last_of_each_name

LIMIT = 1000
FORM = "Content-Type: application/x-www-form-urlencoded"
MULTIPART = "Content-Type: multipart/form-data; boundary=b0"
BAD = "BadRequestException"


class Reading:
    """A route that reads its request as an inference does."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.inputs: list[Input] = []
        self.limit = limit
        self.routes = {"a": Route(self.serve)}

    async def serve(self, request: HttpRequest) -> HttpResponse:
        extra = {"url_path": "p/q", "explain": "False"}
        self.inputs.append(await read_input(request, self.limit, extra))
        return HttpResponse(200, b"read")

    @property
    def parts(self) -> dict[str, tuple[str, bytes]]:
        [input_] = self.inputs
        parts = [(part.name, part.content_type, bytes(part.body)) for part in input_.parts]
        assert len({name for name, _, _ in parts}) == len(parts)
        return {name: (kind, body) for name, kind, body in parts}


@pytest.fixture
def reading():
    return Reading()


def field(disposition: str, body: str, *headers: str) -> str:
    lines = ["--b0", f"Content-Disposition: form-data; {disposition}", *headers, "", body, ""]
    return "\r\n".join(lines)


def multipart(*fields: str) -> bytes:
    return ("".join(fields) + "--b0--\r\n").encode()


# -- the table of rest-api.md, section 6 -----------------------------------------------------------


@pytest.mark.parametrize(
    "content_type",
    [
        "",
        "application/octet-stream",
        "application/json",
        "application/json; charset=utf-8",
        "text/plain",
        "multipart/form-data",
        "multipart/mixed; boundary=b0",
        "image/jpeg",
    ],
)
def test_any_other_body_is_one_part_with_the_requests_media_type(content_type, reading):
    headers = [f"Content-Type: {content_type}"] if content_type else []
    fakes.exchange(reading.routes, fakes.request("/a", "POST", b"\x00{--b0", *headers))
    media_type = content_type.partition(";")[0]
    assert reading.parts == {"body": (media_type, b"\x00{--b0")}


@pytest.mark.parametrize("method", ["GET", "POST", "PUT"])
def test_without_a_body_the_part_is_empty(method, reading):
    fakes.exchange(reading.routes, fakes.request("/a", method))
    assert reading.parts == {"body": ("", b"")}


@pytest.mark.parametrize(
    ("body", "parts"),
    [
        (b"a=1&b=2", {"a": b"1", "b": b"2"}),
        (b"a=1&a=2", {"a": b"2"}),
        (b"a=x+y%20z%2B", {"a": b"x y z+"}),
        (b"a=%ff%00", {"a": b"\xff\x00"}),
        (b"na%20me=1", {"na me": b"1"}),
        (b"a=", {"a": b""}),
        (b"a=b=c", {"a": b"b=c"}),
        (b"hello", {}),
        (b"a=1&hello", {"a": b"1"}),
        (b"hello&a=1", {"hello": b"", "a": b"1"}),
        (b"=1&&a=2", {"a": b"2"}),
        (b"a=1&b=2\r\n", {"a": b"1", "b": b"2"}),
        (b"a=1&b=2\n\n", {"a": b"1", "b": b"2\n"}),
        (b"a=%0A\n", {"a": b"\n"}),
        (b"a=1&\n", {"a": b"1"}),
        (b"\n", {}),
        (b"", {}),
    ],
)
def test_a_form_has_a_part_for_each_field(body, parts, reading):
    answer = fakes.exchange(reading.routes, fakes.request("/a", "POST", body, FORM))
    assert answer.status == 200
    assert reading.parts == {name: ("", value) for name, value in parts.items()}


@pytest.mark.parametrize("body", [b"a=%", b"a=%2", b"a=%zz", b"%g1=a"])
def test_a_broken_escape_in_a_form_is_the_clients_fault(body, reading):
    answer = fakes.exchange(reading.routes, fakes.request("/a", "POST", body, FORM))
    assert (answer.status, answer.document["type"]) == (400, BAD)


def test_a_multipart_body_has_a_part_for_each_field(reading):
    body = multipart(
        field('name="data"; filename="d.json"', "[1]", "Content-Type: application/json"),
        field('name="image"; filename="i"', "pixels"),
        field('name="note"', "text", "Content-Type: application/json"),
        field('name="sent"; filename="x"', "aGk=", "Content-Transfer-Encoding: base64"),
    )
    answer = fakes.exchange(reading.routes, fakes.request("/a", "POST", body, MULTIPART))
    assert answer.status == 200
    assert reading.parts == {
        "data": ("application/json", b"[1]"),
        "image": ("application/octet-stream", b"pixels"),
        "note": ("", b"text"),
        "sent": ("application/octet-stream", b"hi"),
    }


@pytest.mark.parametrize(
    "file_name", ['"a"b.png"', '"C:\\"', "my photo.png", "a.png", '""', '"it\'s; one.png"']
)
def test_a_part_is_a_file_however_its_name_is_spelt(file_name, reading):
    part = field(f'name="data"; filename={file_name}', "pixels", "Content-Type: image/png")
    fakes.exchange(reading.routes, fakes.request("/a", "POST", multipart(part), MULTIPART))
    assert reading.parts == {"data": ("image/png", b"pixels")}


def test_a_name_may_end_in_a_backslash(reading):
    """Browsers and ``requests`` write it as it is."""
    parts = multipart(field(r'name="a\"', "1"), field(r'name="b\"; filename="c"', "2"))
    fakes.exchange(reading.routes, fakes.request("/a", "POST", parts, MULTIPART))
    assert list(reading.parts) == ["a\\", "b\\"]


def test_of_parts_with_one_name_the_last_replaces_the_others(reading):
    fields = [field(f'name="{name}"', body) for name, body in ("a1", "b2", "a3", "c4", "b5")]
    fakes.exchange(reading.routes, fakes.request("/a", "POST", multipart(*fields), MULTIPART))
    [input_] = reading.inputs
    assert [bytes(part.body) for part in input_.parts] == [b"1", b"2", b"3", b"4", b"5"]
    assert [bytes(part.body) for part in last_of_each_name(input_.parts)] == [b"3", b"5", b"4"]


@pytest.mark.parametrize(
    "body",
    [
        multipart(field('filename="x"', "no name")),
        multipart(field('name="a"', "x", "Content-Transfer-Encoding: rot13")),
        b"--b0\r\nno head at all",
        b"--b0\r\nContent-Disposition: form-data; name=a\r\nno colon\r\n\r\nx\r\n--b0--\r\n",
        b"--b0\r\nContent-Disposition: form-data; name=a\r\n\r\ntruncated",
        b"--b0\r\nContent-Type: multipart/mixed; boundary=b1\r\n\r\n--b1\r\n\r\n\r\n--b0--\r\n",
    ],
)
def test_a_broken_multipart_body_is_the_clients_fault(body, reading):
    answer = fakes.exchange(reading.routes, fakes.request("/a", "POST", body, MULTIPART))
    assert (answer.status, answer.document["type"]) == (400, BAD)


def mixed(*fields: str, outer: str = 'name="f"', boundary: str = "b1") -> str:
    """A field of several files; the disposition of each is given as to `field`."""
    inner = "".join(fields).replace("--b0", "--b1").replace("form-data; ", "")
    return field(outer, f"{inner}--b1--", f"Content-Type: Multipart/Mixed; boundary={boundary}")


A, B = field('file; filename="a"', "A", "Content-Type: text/a"), field("file; filename=b", "B")


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ([mixed(A, B)], [("f", "text/a", b"A"), ("f", "application/octet-stream", b"B")]),
        ([mixed(A, boundary='"b1"')], [("f", "text/a", b"A")]),
        ([mixed(A), field("name=g", "G")], [("f", "text/a", b"A"), ("g", "", b"G")]),
        ([mixed(A, outer='name="f"; filename="o"')], [("f", "text/a", b"A")]),
        (
            [mixed(field("attachment; name=z; filename=a", "A", "Content-Type: text/a"), B)],
            [("z", "text/a", b"A"), ("z", "application/octet-stream", b"B")],
        ),
        ([mixed(field("file", "A"))], [("f", "", b"A")]),
        ([mixed()], []),
        ([mixed(A).replace("--b1--\r\n", "--b1--\r\nbehind\r\n")], [("f", "text/a", b"A")]),
        (
            [mixed(field("file", "QQ==", "Content-Transfer-Encoding: base64"))],
            [("f", "", b"A")],
        ),
        ([field("name=f", "A", "Content-Type: multipart/mixed")], [("f", "", b"A")]),
        (
            [field("name=f", "A", "Content-Type: multipart/alternative; boundary=b1")],
            [("f", "", b"A")],
        ),
    ],
)
def test_the_parts_of_a_multipart_mixed_part_have_its_name(fields, parts, reading):
    answer = fakes.exchange(
        reading.routes, fakes.request("/a", "POST", multipart(*fields), MULTIPART)
    )
    assert answer.status == 200
    [input_] = reading.inputs
    assert [(part.name, part.content_type, bytes(part.body)) for part in input_.parts] == parts


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (mixed(A).replace("--b1--", ""), "the last boundary is missing"),
        (mixed(A, boundary="b2"), "the last boundary is missing"),
        (mixed(A.replace("\r\n\r\n", "\r\n")), "the head of a part does not end"),
        (
            mixed(field("file", "", "Content-Type: multipart/mixed; boundary=b2")),
            "a part of a multipart/mixed part is multipart/mixed",
        ),
    ],
)
def test_a_broken_multipart_mixed_part_is_the_clients_fault(broken, reason, reading):
    body = multipart(broken, field("name=g", "G"))
    answer = fakes.exchange(reading.routes, fakes.request("/a", "POST", body, MULTIPART))
    assert (answer.status, answer.document["type"]) == (400, BAD)
    assert reason in answer.document["message"]


@pytest.mark.parametrize(
    "body",
    [
        multipart(field("name=a", "1"), field("name=b", "2")).replace(b"\r", b""),
        multipart(field("name=a", "1"), field("name=b", "2")).removesuffix(b"--\r\n"),
        multipart(field("name=a", "1"), field("name=b", "2")).replace(b"\r", b"")[:-3],
    ],
)
def test_a_multipart_body_written_by_hand(body, reading):
    """Without carriage returns, or without the last dashes, as TorchServe takes it."""
    answer = fakes.exchange(reading.routes, fakes.request("/a", "POST", body, MULTIPART))
    assert answer.status == 200
    assert reading.parts == {"a": ("", b"1"), "b": ("", b"2")}


# No semicolon: aiohttp takes several of them for a malformed header, in quotes or not.
NAMES = st.text(
    st.characters(exclude_categories=["C", "Z"], exclude_characters='"\\%;'), min_size=1
)
BODIES = st.binary(max_size=200).filter(lambda body: b"--b0" not in body)
FIELDS = st.dictionaries(NAMES, BODIES | st.tuples(NAMES, BODIES, st.just("image/png")), max_size=5)


@given(fields=FIELDS)
@example(fields={"/a": b"", "//b/c": ("f", b"", "image/png")})
def test_the_fields_of_a_multipart_body_arrive_as_they_were(fields):
    reading = Reading(limit=10**6)
    body, _ = encode_multipart_formdata(fields, boundary="b0")
    answer = fakes.exchange(reading.routes, fakes.request("/a", "POST", body, MULTIPART))
    assert answer.status == 200
    assert reading.parts == {
        name: (value[2], value[1]) if isinstance(value, tuple) else ("", value)
        for name, value in fields.items()
    }


def test_name_is_not_overridden_by_its_extended_form():
    for order in ("name=a; name*=utf-8''b", "name*=utf-8''b; name=a"):
        reading = Reading()
        head = f"--b0\r\nContent-Disposition: form-data; {order}\r\n\r\n"
        body = head.encode() + b"x\r\n--b0--\r\n"
        fakes.exchange(reading.routes, fakes.request("/a", "POST", body, MULTIPART))
        assert reading.parts == {"a": ("", b"x")}


SCRAPS = st.sampled_from(
    [
        b"--b0\r\n",
        b"--b0--\r\n",
        b"\r\n\r\n",
        b"Content-Disposition: form-data; name=a\r\n\r\n",
        b"Content-Disposition: form-data; filename*=utf-8''%ff\r\n",
        b"Content-Transfer-Encoding: base64\r\n\r\n",
        b"Content-Encoding: gzip\r\n",
        b"Content-Length: -1\r\n",
        b"Content-Type: multipart/mixed; boundary=b0\r\n\r\n",
        b"Content-Disposition: file; name=a\r\nContent-Type: multipart/mixed; boundary=b\r\n\r\n",
        b"\r\n--b\r\n",
        b"\r\n--b--",
        b"--b0\n",
        b'Content-Disposition: form-data; name="_charset_"\r\n\r\nrot13',
    ]
)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # as the server does; pytest undoes it
@given(scraps=st.lists(SCRAPS | st.binary(max_size=20), max_size=10))
def test_any_multipart_body_is_read_or_refused(scraps):
    reading = Reading()
    sent = fakes.request("/a", "POST", b"".join(scraps), MULTIPART)
    answer = fakes.exchange(reading.routes, sent)
    assert answer.status == (200 if reading.inputs else 400)


# -- headers ---------------------------------------------------------------------------------------


def test_the_handler_sees_the_clients_headers_in_its_case_and_the_servers_own(reading):
    sent = fakes.request("/a", "POST", b"x", "X-Trace: Grün", "Explain: mine", "explain: mine")
    answer = fakes.exchange(reading.routes, sent)
    [input_] = reading.inputs
    assert input_.id == answer.headers["x-request-id"]
    assert input_.headers == {
        "Host": "localhost",
        "Connection": "close",
        "X-Trace": "Grün",
        "Explain": "mine",
        "Content-Length": "1",
        "url_path": "p/q",
        "explain": "False",
    }


def test_a_body_in_chunks_gets_a_content_length(reading):
    chunked = fakes.request(
        "/a", "POST", b"", "TRANSFER-Encoding: chunked", "Expect: 100-continue", framed=False
    )
    fakes.exchange(reading.routes, chunked + b"2\r\nab\r\n1\r\nc\r\n0\r\n\r\n")
    [input_] = reading.inputs
    assert input_.headers.keys() == {"Host", "Connection", "content-length", "url_path", "explain"}
    assert input_.headers["content-length"] == "3"


@pytest.mark.parametrize(("method", "name"), [("GET", "content-length"), ("PUT", "Content-Length")])
def test_a_request_without_a_body_has_a_content_length_all_the_same(method, name, reading):
    fakes.exchange(reading.routes, fakes.request("/a", method))
    assert reading.inputs[0].headers[name] == "0"


# -- framing and limits ----------------------------------------------------------------------------


def chunked(*chunks: bytes) -> bytes:
    return head("Transfer-Encoding: chunked") + b"".join(
        b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks
    )


def head(*headers: str) -> bytes:
    lines = ["POST /a HTTP/1.1", "Host: localhost", "Connection: close", *headers, "", ""]
    return "\r\n".join(lines).encode()


def test_a_chunked_body_is_put_together(reading):
    fakes.exchange(reading.routes, chunked(b"first", b" last", b""))
    assert reading.parts == {"body": ("", b"first last")}


def test_a_body_at_the_limit_passes(reading):
    answer = fakes.exchange(reading.routes, fakes.request("/a", "POST", b"x" * LIMIT))
    assert answer.status == 200


def test_a_body_announced_above_the_limit_is_refused_before_it_is_sent(reading):
    answer = fakes.exchange(reading.routes, head(f"Content-Length: {LIMIT + 1}"), lingers=True)
    assert answer.status == 413
    assert reading.inputs == []


def test_a_chunked_body_is_refused_where_it_passes_the_limit(reading):
    answer = fakes.exchange(reading.routes, chunked(b"x" * LIMIT, b"x"), lingers=True)
    assert answer.status == 413


@pytest.mark.parametrize(
    "sent",
    [
        head("Content-Length: 10") + b"short",
        chunked(b"first"),
    ],
)
def test_a_body_that_ends_early_never_becomes_an_input(sent, reading):
    fakes.exchange(reading.routes, sent, half_close=True)
    assert reading.inputs == []


def test_a_malformed_chunk_is_a_bad_request(reading):
    answer = fakes.exchange(reading.routes, chunked(b"first") + b"no chunk\r\n\r\n")
    assert (answer.status, answer.document["type"]) == (400, BAD)
    assert reading.inputs == []


def test_a_client_that_expects_100_continue_gets_it(reading):
    sent = head("Content-Length: 4", "Expect: 100-continue")
    answer = fakes.exchange(reading.routes, sent, b"body")
    assert answer.status_line == "HTTP/1.1 100 Continue"
    assert fakes.parse_answer(answer.body).body == b"read"
    assert reading.parts == {"body": ("", b"body")}


def test_a_client_that_expects_to_send_too_much_gets_no_100_continue(reading):
    sent = head(f"Content-Length: {LIMIT + 1}", "Expect: 100-continue")
    assert fakes.exchange(reading.routes, sent, lingers=True).status == 413


def test_a_client_that_leaves_in_the_middle_of_its_body_leaves_nothing_running():
    ended = []

    async def serve(request):
        try:
            return HttpResponse(200, await read_body(request, LIMIT))
        finally:
            ended.append(request.id)

    fakes.exchange({"a": Route(serve)}, head("Content-Length: 10") + b"x", half_close=True)
    assert len(ended) == 1


def test_more_than_1000_parts_are_refused(reading):
    part = b'--b0\r\nContent-Disposition: form-data; name="a"\r\n\r\n\r\n'
    reading.limit = 10**6
    body = part * 1001 + b"--b0--\r\n"
    answer = fakes.exchange(reading.routes, fakes.request("/a", "POST", body, MULTIPART))
    assert (answer.status, answer.document["type"]) == (400, BAD)
    assert "more than 1000 parts" in answer.document["message"]


def test_a_compressed_body_is_passed_on_as_it_came(reading):
    for body in (gzip.compress(b"cat"), b"no gzip at all"):
        fakes.exchange(reading.routes, fakes.request("/a", "POST", body, "Content-Encoding: gzip"))
        [part] = reading.inputs[-1].parts
        assert part.body == body
