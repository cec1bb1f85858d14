"""Bodies of KServe's protocols, and of TensorFlow Serving's, through their envelopes in a worker.

The first line of an input is the media type; a number behind it, if any, is what the header of the
Open Inference Protocol says of the length of the JSON, in front of tensors as bytes.
"""

import json
import sys
from typing import Any

from fuzz.limits import Limits

from marserve.backend.context import Context
from marserve.backend.loader import wrap
from marserve.backend.metrics import MetricsStore
from marserve.backend.protocol import Input, Part, Predict, Reply
from marserve.backend.service import Service
from marserve.handlers.request_envelope.json import JSONEnvelope
from marserve.handlers.request_envelope.kserve import KServeEnvelope
from marserve.handlers.request_envelope.kservev2 import KServev2Envelope

LIMITS = Limits(calls=8_000, calls_per_byte=80, memory_per_byte=8_000)

_INSTANCES = b'{"instances": [1]}'
_TENSORS = b'{"inputs": [{"name": "x", "shape": [1], "datatype": "INT64", "data": [1]}]}'
_ENVELOPES = (
    (JSONEnvelope, _INSTANCES),
    (KServeEnvelope, _INSTANCES),
    (KServev2Envelope, _TENSORS),
)


def target(data: bytes) -> None:
    """Whatever comes is answered or refused; the good request beside it has its answer."""
    line, _, body = data.partition(b"\n")
    media_type, _, length = line.decode("latin-1").partition(" ")
    headers = {"Inference-Header-Content-Length": length} if length else {}
    request = Input("mine", headers, [Part("body", media_type, body)])
    for envelope, good in _ENVELOPES:
        alone = _predict(envelope, _good(good))
        assert [each.status for each in alone.predictions] == [200], alone
        both = _predict(envelope, request, _good(good))
        _check_json(_predict(envelope, request))
        if both.predictions:  # else the handler's results could not be dealt out
            assert bytes(both.predictions[1].body) == bytes(alone.predictions[0].body)
        _check_json(both)


def _good(body: bytes) -> Input:
    return Input("good", {}, [Part("body", "application/json", body)])


def _predict(envelope: Any, *requests: Input) -> Reply:
    def handle(rows: Any, _context: Context) -> Any:
        return [row["data"] if isinstance(row, dict) and "data" in row else 1 for row in rows]

    manifest = {"model": {"modelName": "m", "modelVersion": "1"}}
    context = Context("m", "/m", manifest, 4, None, "1", metrics=MetricsStore())
    return Service(wrap(handle, envelope), context).predict(Predict(requests))


def _check_json(reply: Reply) -> None:
    assert sys.getsizeof(reply.message) < 10_000
    for each in reply.predictions:
        if "json" in each.headers.get("content-type", ""):
            json.loads(bytes(each.body))
        assert 200 <= each.status < 600
