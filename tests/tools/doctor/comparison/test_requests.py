"""Reading the requests that are sent."""

import base64
import json

import pytest

from marserve.tools.bench.errors import BenchError
from marserve.tools.doctor.comparison.requests import read_requests
from marserve.tools.doctor.errors import DoctorError

ACCESSES = """
2023-11-23T02:03:03,123 - /127.0.0.1:45678 "POST /predictions/m HTTP/1.1" 200 88
2023-11-23T02:03:03,223 - /127.0.0.1:45678 "GET /ping HTTP/1.1" 200 0
2023-11-23T02:03:03,323 - /127.0.0.1:45678 "gRPC org.pytorch/Ping HTTP/2.0" 0 1
2023-11-23T02:03:04,123 - /127.0.0.1:45679 "DELETE /models/m HTTP/1.1" 200 2
2023-11-23T02:03:05,123 - /127.0.0.1:45678 "POST /predictions/m/2.0?a=1 HTTP/1.1" 200 88
"""


@pytest.fixture
def inputs(tmp_path):
    folder = tmp_path / "inputs"
    folder.mkdir()
    (folder / "a.json").write_text('{"x": 1}')
    (folder / "b.txt").write_text("hello")
    return str(folder)


@pytest.fixture
def write(tmp_path):
    def write(name, content):
        path = tmp_path / name
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return write


def test_a_request_for_each_input(inputs):
    found = read_requests([], [inputs], "/predictions/m").requests
    assert [str(each) for each in found] == [
        "POST /predictions/m (a.json)",
        "POST /predictions/m (b.txt)",
    ]
    assert [each.headers["Content-Type"] for each in found] == ["application/json", "text/plain"]
    assert [each.body for each in found] == [b'{"x": 1}', b"hello"]
    (one, *_) = read_requests([], [inputs], "/predictions/m", "image/png").requests
    assert one.headers["Content-Type"] == "image/png"


def test_an_access_log_with_bodies_from_elsewhere(write, inputs):
    log = write("access_log.log", ACCESSES)
    found = read_requests([log], [inputs], "")
    assert [(each.method, each.target) for each in found.requests] == [
        ("POST", "/predictions/m"),
        ("GET", "/ping"),
        ("POST", "/predictions/m/2.0?a=1"),
    ]
    assert [each.body for each in found.requests] == [b'{"x": 1}', None, b"hello"]
    assert [each.method for each in found.left_out] == ["DELETE"]
    with pytest.raises(DoctorError, match=r"no bodies.*--input"):
        read_requests([log], [], "")


def test_json_lines_and_yaml(write, tmp_path):
    (tmp_path / "cat.jpg").write_bytes(b"\xff\xd8")
    items = [
        {"path": "/ping"},
        {"path": "/predictions/m", "body": {"x": 1}},
        {"path": "/predictions/m", "body": "text", "headers": {"content-type": "text/plain"}},
        {"path": "/predictions/m", "base64": base64.b64encode(b"\0\1").decode()},
        {"path": "/predictions/m", "file": "cat.jpg", "method": "PUT"},
        {"path": "/predictions/m", "form": {"image": "@cat.jpg", "top": 3}},
    ]
    lines = write("a.jsonl", "\n".join(map(json.dumps, items)) + "\n")
    as_list = write("a.json", items)
    as_yaml = write("a.yaml", items)  # JSON is yaml
    for file in (lines, as_list, as_yaml):
        found = read_requests([file], [], "").requests
        assert [each.method for each in found] == ["GET", "POST", "POST", "POST", "PUT", "POST"]
        assert [each.body for each in found][:5] == [
            None,
            b'{"x": 1}',
            b"text",
            b"\0\1",
            b"\xff\xd8",
        ]
        assert [each.headers.get("Content-Type") for each in found][1:5] == [
            "application/json", None, None, "image/jpeg"
        ]  # fmt: skip
        form = found[5]
        assert form.headers["Content-Type"].startswith("multipart/form-data; boundary=")
        assert b'name="image"; filename="cat.jpg"' in form.body
        assert b"\xff\xd8" in form.body
        assert b'name="top"\r\n\r\n3\r\n' in form.body


def test_a_har_file(write):
    def entry(**request):
        url = "http://old:8080/predictions/m?x=a%20b"
        headers = [
            {"name": ":authority", "value": "old"},
            {"name": "Accept", "value": "*/*"},
        ]
        return {"request": {"method": "POST", "url": url, "headers": headers, **request}}

    har = write(
        "a.har",
        {
            "log": {
                "entries": [
                    entry(postData={"mimeType": "application/json", "text": '{"x": 1}'}),
                    entry(postData={"mimeType": "x", "text": "AAE=", "encoding": "base64"}),
                    entry(postData={"mimeType": "multipart/form-data; boundary=x",
                                    "params": [{"name": "data", "value": "hi"}]}),
                    entry(postData={"mimeType": "application/x-www-form-urlencoded",
                                    "params": [{"name": "data", "value": "a b"}]}),
                    entry(method="GET", url="http://old:8080/ping"),
                ]
            }
        },
    )  # fmt: skip
    found = read_requests([har], [], "").requests
    assert [each.target for each in found] == ["/predictions/m?x=a%20b"] * 4 + ["/ping"]
    assert found[0].headers == {"Accept": "*/*"}
    assert [found[0].body, found[1].body] == [b'{"x": 1}', b"\0\1"]
    assert b'name="data"\r\n\r\nhi\r\n' in found[2].body
    assert found[3].body == b"data=a+b"
    assert found[4].body is None


@pytest.mark.parametrize(
    ("method", "path", "is_sent"),
    [
        ("POST", "/predictions/m/1.0/some/path", True),
        ("POST", "/v1/models/m:predict", True),
        ("POST", "/v2/models/m/versions/1/infer", True),
        ("POST", "/models/m/invoke", True),
        ("POST", "/invocations", True),
        ("POST", "/wfpredict/w", True),
        ("GET", "/models", True),
        ("POST", "/models?url=m.mar", False),
        ("PUT", "/models/m", False),
        ("DELETE", "/predictions/m", True),
        ("POST", "/v2/repository/models/m/unload", False),
        ("PUT", "/loggers/root?level=debug", False),
    ],
)
def test_what_may_change_something_is_not_sent(write, method, path, is_sent):
    file = write("a.json", [{"path": "/ping"}, {"method": method, "path": path}])
    found = read_requests([file], [], "")
    kept, left_out = ([each.target for each in of] for of in (found.requests, found.left_out))
    assert (kept, left_out) == ((["/ping", path], []) if is_sent else (["/ping"], [path]))


def test_a_few_of_many_are_taken_evenly(write):
    file = write("a.json", [{"path": f"/ping?n={number}"} for number in range(100)])
    found = read_requests([file], [], "", limit=4)
    assert [each.target[8:] for each in found.requests] == ["0", "25", "50", "75"]
    assert found.sampled_from == 100


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.log", "nothing like it", "no requests"),
        ("a.yaml", "a: [", "cannot be parsed"),
        ("a.jsonl", '{"path": "/x"}\n{', "cannot be parsed"),
        ("a.json", '[{"url": "/x"}]', "has no path"),
        ("a.json", '[{"path": "/x", "boddy": 1}]', "boddy"),
        ("a.json", '[{"path": "/x", "file": "none"}]', "none: No such file"),
        ("a.json", '[{"path": "/x", "body": 1, "file": "b"}]', "one of body and file"),
        ("a.json", '[{"path": "/x", "base64": "*"}]', "not understood"),
        ("a.json", "[1]", "has no path"),
        ("a.har", '{"log": {"entries": [{}]}}', "not understood"),
        ("a.har", '{"log": 1}', "not understood"),
        ("a.json", "[]", "nothing to send"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(write, name, content, words):
    with pytest.raises(DoctorError, match=words):
        read_requests([write(name, content)], [], "")


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(DoctorError, match="Cannot read"):
        read_requests([tmp_path / "none.har"], [], "")
    with pytest.raises(BenchError, match="nothing to send"):
        read_requests([], [str(tmp_path / "none")], "/predictions/m")
