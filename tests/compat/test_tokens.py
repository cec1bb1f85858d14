"""Authorization on, model control off, one model loaded at start."""

import json

import pytest

pytestmark = pytest.mark.integration

TORCHSERVES = (
    "Token Authorization failed. Token either incorrect, expired, or not provided correctly"
)
REFUSED = (
    f"{TORCHSERVES}. The flag --disable-token-auth serves without tokens; --enable-model-api "
    "permits registration over HTTP."
)
NOT_RENEWED = TORCHSERVES.replace("Authorization", "Authentication")


@pytest.fixture(scope="module")
def server(start_compat_server):
    properties = {
        "enable_model_api": "false",
        "disable_token_authorization": "false",
        "load_models": "probe.mar",
        "default_workers_per_model": "1",
    }
    with start_compat_server(**properties) as server:
        yield server


@pytest.fixture
def ask(ask_of, server):
    """Ask with one of the keys that are in force, or with a whole header."""

    def ask(line, key=None, *, authorization=None, to="inference"):
        if key is not None:
            authorization = f"Bearer {keys(server)[key]['key']}"
        headers = {"Authorization": authorization} if authorization is not None else {}
        return ask_of(server)(line, headers=headers, to=to)

    return ask


def keys(server):
    return json.loads((server.directory / "key_file.json").read_text())


def invalid_key(answer, message=REFUSED):
    assert (answer.status, answer.reason) == (400, "Bad Request")
    assert answer.body.decode() == (
        f'{{\n  "code": 400,\n  "type": "InvalidKeyException",\n  "message": "{message}"\n}}\n'
    )


@pytest.mark.parametrize(
    ("line", "to", "key"),
    [
        ("GET /ping", "inference", "inference"),
        ("POST /predictions/probe", "inference", "inference"),
        ("POST /explanations/probe", "inference", "inference"),
        ("POST /invocations", "inference", "inference"),  # of the only model loaded at start
        ("POST /models/probe/invoke", "inference", "inference"),
        ("POST /probe/predict", "inference", "inference"),
        ("POST /v1/models/probe:predict", "inference", "inference"),
        ("POST /v2/models/probe/infer", "inference", "inference"),
        ("GET /models", "management", "management"),
        ("GET /models/probe", "management", "management"),
        ("GET /v1/models/probe", "management", "management"),
    ],
)
def test_each_listener_wants_its_own_key(ask, line, to, key):
    assert ask(line, key, to=to).status == 200
    other = {"inference": "management", "management": "inference"}[key]
    invalid_key(ask(line, to=to))
    invalid_key(ask(line, other, to=to))
    invalid_key(ask(line, "API", to=to))


@pytest.mark.parametrize(
    ("form", "is_good"),
    [
        ("Bearer {}", True),
        ("Bearer   {}", True),
        ("Bearer {} x", False),
        ("bearer {}", False),
        ("Basic {}", False),
        ('Bearer "{}"', False),
        ("{}", False),
        ("Bearer", False),
    ],
)
def test_the_form_of_the_header(ask, server, form, is_good):
    key = keys(server)["inference"]["key"]
    answer = ask("GET /ping", authorization=form.format(key))
    if is_good:
        assert answer.status == 200
    else:
        invalid_key(answer)


@pytest.mark.parametrize("to", ["inference", "management", "metrics"])
@pytest.mark.parametrize(
    ("line", "status"), [("OPTIONS /", 200), ("GET /api-description", 200), ("GET /", 405)]
)
def test_what_needs_no_key(ask, to, line, status):
    assert ask(line, to=to).status == status


def test_metrics_need_no_key(ask):
    assert ask("GET /metrics", to="metrics").status == 200


@pytest.mark.parametrize(
    "line", ["POST /models?url=probe.mar", "DELETE /models/probe", "DELETE /models/nobody"]
)
def test_models_cannot_be_changed(ask, line):
    answer = ask(line, "management", to="management")
    assert (answer.status, json.loads(answer.body)["type"]) == (405, "MethodNotAllowedException")
    invalid_key(ask(line, to="management"))


def test_workers_can(ask):
    assert ask("PUT /models/probe?min_worker=1", "management", to="management").status == 202
    answer = ask("PUT /models/probe/1.0/set-default", "management", to="management")
    assert answer.status == 200


def test_the_key_file(server):
    file = server.directory / "key_file.json"
    assert file.stat().st_mode & 0o777 == 0o600
    found = keys(server)
    assert list(found) == ["management", "inference", "API"]
    assert {len(item["key"]) for item in found.values()} == {8}
    assert [list(item) for item in found.values()] == [
        ["key", "expiration time"],
        ["key", "expiration time"],
        ["key"],
    ]


@pytest.mark.parametrize("kind", ["inference", "management"])
def test_a_key_is_renewed(ask, server, kind):
    before = keys(server)
    answer = ask(f"GET /token?type={kind}", "API", to="management")
    assert (answer.status, answer.body) == (200, b"\n")
    assert answer.header("content-type") == "application/json"
    after = keys(server)
    assert {name for name in before if before[name] != after[name]} == {kind}


@pytest.mark.parametrize(
    ("query", "key"),
    [
        ("type=inference", "management"),
        ("type=inference", None),
        ("type=API", "API"),
        ("type=other", "API"),
        ("type=", "API"),
        ("", "API"),
    ],
)
def test_a_renewal_that_is_refused(ask, query, key):
    invalid_key(ask(f"GET /token?{query}", key, to="management"), NOT_RENEWED)
