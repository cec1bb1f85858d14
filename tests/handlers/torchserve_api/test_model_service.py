import json

import pytest

from marserve.backend.errors import PredictionException
from marserve.handlers.torchserve_api.model_service import ModelService, SingleNodeService


class Echo(SingleNodeService):
    def ping(self):
        return "healthy"

    def _preprocess(self, data):
        return ["pre", *data]

    def _inference(self, data):
        return [*data, "in"]

    def _postprocess(self, data):
        return {"seen": data}


@pytest.fixture
def make(tmp_path, make_context):
    def make(input_type="application/json", name="sig.json"):
        signature = {"input_type": input_type, "inputs": [{"data_name": "img"}]}
        (tmp_path / "sig.json").write_text(json.dumps(signature))
        context = make_context()
        context.manifest = {"Model": {"Signature": name}}
        service = Echo("echo", str(tmp_path), None)
        service.initialize(context)
        return service

    return make


@pytest.mark.parametrize(
    ("row", "value"),
    [
        ({"img": b'{"a": true}', "body": b"no"}, {"a": True}),
        ({"body": bytearray(b"{'a': 1}")}, {"a": 1}),
        ({"data": {"a": 2}}, {"a": 2}),
        ({}, None),
    ],
)
def test_stages_and_inputs(make, row, value):
    service = make()
    assert isinstance(service, ModelService)
    assert service.handle([row], None) == [{"seen": ["pre", value, "in"]}]
    assert service.signature()["inputs"] == [{"data_name": "img"}]


@pytest.mark.parametrize(
    "body", [b"no", b"[" * 100_000, b"9" * 5000, b"\xff", b"\0", b"open('x')", b"{[]: 1}", b"1e"]
)
def test_a_body_that_is_no_json_is_refused(make, body):
    with pytest.raises(PredictionException, match=r"not JSON\. : 400"):
        make().handle([{"body": body}], None)


def test_other_types_stay_bytes(make):
    assert make("image/jpeg").handle([{"img": b"[1]"}], None) == [{"seen": ["pre", b"[1]", "in"]}]


def test_a_missing_signature(make):
    with pytest.raises(ValueError, match="Signature file is not found"):
        make(name="gone.json")
