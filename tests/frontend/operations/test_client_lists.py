"""A client's list taken apart, and its answers put together again."""

import json
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from steps import result_of

from marserve.backend.conversion import encode_result
from marserve.backend.protocol import Input, Part, Prediction
from marserve.frontend.batching.options import Batching
from marserve.frontend.batching.rows import in_blocks
from marserve.frontend.http.responses import HttpResponse
from marserve.frontend.operations.client_lists import ClientList
from marserve.frontend.operations.client_lists import read_list as read_list_in_steps

JSON = "application/json"
MANY = 1000

T = TypeVar("T")

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def request(body: Any, content_type: str = JSON, *more: Part, **headers: str) -> Input:
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Input("id", headers, [*more, Part("body", content_type, body)])


def read_list(*arguments: Any) -> ClientList | None:
    return result_of(read_list_in_steps(*arguments))


def taken_apart(input_: Input, envelope: str = "", max_rows: int = MANY) -> ClientList:
    found = read_list(input_, envelope, max_rows)
    assert found is not None
    return found


def bodies(found: ClientList) -> list[Any]:
    return [json.loads(bytes(row.parts[-1].body)) for row in in_blocks(found.rows)[0]]


def body_of(answer: HttpResponse) -> str:
    return bytes(answer.body).decode()


# -- apart -----------------------------------------------------------------------------------------


@given(st.lists(json_values, max_size=30))
def test_an_array_has_a_row_for_each_item(items):
    found = taken_apart(request(items))
    assert bodies(found) == items
    assert {row.parts[-1].content_type for row in found.rows} <= {JSON}
    assert {row.parts[-1].name for row in found.rows} <= {"body"}


@pytest.mark.parametrize(
    ("explain", "member"), [("False", "predictions"), ("True", "explanations")]
)
def test_so_have_instances(explain, member):
    input_ = request({"instances": [[1], {"a": None}], "signature_name": "s"}, explain=explain)
    found = taken_apart(input_)
    assert bodies(found) == [[1], {"a": None}]
    assert found.member == member


@pytest.mark.parametrize(
    ("envelope", "explain", "member"),
    [
        ("kserve", "False", "predictions"),
        ("kserve", "True", "explanations"),
        ("json", "False", "predictions"),
        ("json", "True", "predictions"),
    ],
)
def test_an_envelope_gets_rows_that_it_can_unpack(envelope, explain, member):
    found = taken_apart(request({"instances": ["a", "b"]}, explain=explain), envelope)
    assert bodies(found) == [{"instances": ["a"]}, {"instances": ["b"]}]
    assert (found.member, found.is_enveloped) == (member, True)


def test_several_files_are_a_row_each_and_fields_go_with_all():
    field = Part("threshold", "", b"0.5")
    files = [Part("data", "image/png", b"1"), Part("data", JSON, b"[2]"), Part("x", "text/x", b"3")]
    found = taken_apart(Input("id", {}, [files[0], field, *files[1:]]))
    assert [row.parts for row in found.rows] == [
        [field, Part("body", "image/png", b"1")],
        [field, Part("body", JSON, b"[2]")],
        [field, Part("body", "text/x", b"3")],
    ]


def test_a_row_has_an_id_and_headers_of_its_own():
    headers = {"Content-Type": JSON, "content-length": "99", "X-Mine": "1"}
    found = taken_apart(request(["a", "bc"], JSON, Part("q", "", b"1"), **headers))
    assert [row.id for row in found.rows] == ["id.0", "id.1"]
    assert [row.headers for row in found.rows] == [
        {"Content-Type": JSON, "content-length": length, "X-Mine": "1"} for length in "34"
    ]
    assert [row.parts[0].name for row in found.rows] == ["q", "q"]


@pytest.mark.parametrize(
    "input_",
    [
        request(b"\xff\xd8 image", "image/jpeg"),
        request([1, 2], "text/plain"),
        request([1, 2], ""),
        request(b"[1, 2"),
        request(b"[1] x"),
        request(b"\xff[1]"),
        request(b"[" * 100_000),
        request(b"[" * 100_000 + b"]" * 100_000),
        request(b""),
        request("text"),
        request({"instances": "text"}),
        request({"inputs": [1, 2]}),
        Input("id", {}, []),
        Input("id", {}, [Part("a", "", b"[1]"), Part("b", "", b"[2]")]),
        Input("id", {}, [Part("data", JSON, b"[1, 2]")]),
    ],
    ids=repr,
)
def test_what_is_no_list_stays_one_row(input_):
    assert read_list(input_, "", MANY) is None


@pytest.mark.parametrize("envelope", ["kserve", "json"])
def test_an_array_means_nothing_to_an_envelope(envelope):
    assert read_list(request([1, 2]), envelope, MANY) is None


@pytest.mark.parametrize("wrap", [list, lambda items: {"instances": items}])
def test_of_too_long_a_list_there_is_one_row_too_many(wrap):
    assert bodies(taken_apart(request(wrap([*range(100)])), max_rows=3)) == [0, 1, 2, 3]


def test_of_too_many_files_there_is_one_row_too_many():
    files = [Part("data", "image/png", b"x")] * 10
    assert len(taken_apart(Input("id", {}, files), max_rows=0).rows) == 1


# -- together --------------------------------------------------------------------------------------


@given(st.lists(json_values, max_size=30))
def test_the_answer_is_what_the_handler_would_have_sent_as_one(results):
    answers = [Prediction(encode_result([result])) for result in results]
    answer = result_of(ClientList([]).join(answers))
    assert answer.status == 200
    assert body_of(answer) == json.dumps([[result] for result in results], indent=2)


@pytest.mark.parametrize("member", ["predictions", "explanations"])
@pytest.mark.parametrize("results", [[], [1], [{"a": [1, {"b": 2}]}, [[]]]])
def test_under_a_member_too(member, results):
    answers = [Prediction(encode_result(result)) for result in results]
    answer = result_of(ClientList([], member).join(answers))
    assert body_of(answer) == json.dumps({member: results}, indent=2)


def test_what_an_envelope_wrapped_is_unwrapped():
    answers = [{"predictions": [1]}, {"predictions": [{"a": [2]}, 3]}, {"odd": 4}, [5], "six"]
    found = ClientList([], "predictions", is_enveloped=True)
    answer = result_of(found.join([Prediction(encode_result(result)) for result in answers]))
    joined = {"predictions": [1, {"a": [2]}, 3, {"odd": 4}, [5], "six"]}
    assert body_of(answer) == json.dumps(joined, indent=2)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"tiger", '"tiger"'),
        (b"", '""'),
        (b"12", "12"),
        (b' {"a": 1}\n', '{"a": 1}'),
        (b'"\xc3\xa9"', '"\xe9"'),
        (b"\xff", '"\\ufffd"'),
        (b"two\nlines", '"two\\nlines"'),
        (b"[" * 100_000, json.dumps("[" * 100_000)),
    ],
    ids=range(8),
)
def test_json_stays_as_it_is_and_all_else_is_a_text(body, text):
    answer = result_of(ClientList([]).join([Prediction(body)]))
    assert body_of(answer) == f"[\n  {text}\n]"


def test_the_first_that_is_not_200_speaks_for_all():
    refused = Prediction(b"no image", 400, "Bad", {"x-mine": "1"})
    answer = result_of(ClientList([]).join([Prediction(b"1"), refused]))
    assert (answer.status, answer.reason, body_of(answer)) == (400, "Bad", "no image")
    assert answer.headers == {"x-mine": "1", "x-failed-item": "1"}


# -- on the way ------------------------------------------------------------------------------------


@pytest.fixture
def splitter(registry, make_model):
    """A model that takes lists, in the register under its name, with nobody to answer a row."""
    model = make_model("splitter")
    model.settings = SimpleNamespace(batching=Batching(splits_lists=True))
    model.manifest = SimpleNamespace(envelope="")
    model.queue = SimpleNamespace(free_capacity=lambda _priority: MANY)
    registry.add(model)
    return model


@pytest.mark.parametrize("path", ["/predictions/{}", "/explanations/{}", "/{}/predict"])
@pytest.mark.parametrize(("sent", "answered"), [(b"[]", []), (b'{"instances": []}', None)])
@pytest.mark.usefixtures("splitter")
def test_nobody_is_asked_about_an_empty_list(path, sent, answered, ask):
    answer = ask(path.format("splitter"), "POST", sent, f"Content-Type: {JSON}")
    member = "explanations" if "explanations" in path else "predictions"
    assert (answer.status, answer.headers["content-type"]) == (200, JSON)
    assert answer.document == ({member: []} if answered is None else answered)


@pytest.mark.usefixtures("splitter")
def test_other_models_never_look(ask):
    answer = ask("/predictions/m", "POST", b"[]", f"Content-Type: {JSON}")
    assert answer.document["parts"] == [["body", "[]"]]


@pytest.mark.parametrize("name", ["m", "splitter"])
@pytest.mark.usefixtures("splitter")
def test_of_fields_with_one_name_a_handler_gets_the_last(name, ask):
    lines = '--b0\r\nContent-Disposition: form-data; name="{}"\r\n\r\n{}\r\n'
    fields = [lines.format(*pair) for pair in (("a", "1"), ("model_name", name), ("a", "2"))]
    body = "".join([*fields, "--b0--\r\n"]).encode()
    for path in ("/invocations", f"/predictions/{name}"):
        asked = ask(path, "POST", body, "Content-Type: multipart/form-data; boundary=b0").document
        assert asked["model"] == name
        assert asked["parts"] == [["a", "2"], ["model_name", name]]
