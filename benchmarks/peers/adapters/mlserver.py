"""MLServer: FastAPI on uvicorn, adaptive batching, a pool of worker processes.

One parallel worker (its default). It speaks the Open Inference Protocol as JSON only, so the body
travels as the one string of a BYTES tensor, the cheapest form that it takes; requests of a batch
arrive as one tensor with so many strings. ``debug`` is off, as it recommends for production. Its
workers do not start with uvloop 0.22 or newer, so an older one is installed.
"""

import json

from contract import Peer, Service, Setting, Site

_RUNTIME = """\
import models
from mlserver import MLModel
from mlserver.types import InferenceResponse, ResponseOutput


class Model(MLModel):
    async def load(self):
        self.model = models.load({model!r})
        return True

    async def predict(self, request):
        bodies = [one.encode() for one in request.inputs[0].data]
        answers = [one.decode() for one in self.model(bodies)]
        output = ResponseOutput(name="out", shape=[len(answers), 1], datatype="BYTES", data=answers)
        return InferenceResponse(model_name=self.name, id=request.id, outputs=[output])
"""


def _set_up(site: Site, setting: Setting) -> Service:
    site.write("runtime.py", _RUNTIME.format(model=setting.model))
    http, grpc, metrics = site.ports[:3]
    settings = {
        "debug": False,
        "host": "127.0.0.1",
        "http_port": http,
        "grpc_port": grpc,
        "metrics_port": metrics,
        "parallel_workers": 1,
    }
    model = {
        "name": "model",
        "implementation": "runtime.Model",
        "max_batch_size": setting.batch_size,
        "max_batch_time": setting.window_ms / 1000,
    }
    if setting.batch_size == 1:
        del model["max_batch_size"], model["max_batch_time"]
    site.write("settings.json", json.dumps(settings))
    site.write("model-settings.json", json.dumps(model))
    return Service(
        [site.program("mlserver"), "start", str(site.directory)],
        "/v2/models/model/infer",
        {"PYTHONPATH": str(site.directory)},
        "application/json",
        _encode,
        _decode,
    )


def _encode(body: bytes) -> bytes:
    tensor = {"name": "in", "shape": [1, 1], "datatype": "BYTES", "data": [body.decode()]}
    return json.dumps({"inputs": [tensor]}).encode()


def _decode(answer: bytes) -> bytes:
    text: str = json.loads(answer)["outputs"][0]["data"][0]
    return text.encode()


PEER = Peer(
    "MLServer",
    _set_up,
    ("mlserver", "uvloop<0.22", "torch==2.13.0"),
    note="JSON: a BYTES tensor with one string",
)
