"""LitServe: FastAPI on uvicorn before worker processes.

One worker, one API server (its default for one worker), and ``fast_queue`` (ZeroMQ), which it
recommends above a hundred requests per second. A request annotated as bytes arrives raw, and a
Response is sent raw, which is cheaper than its default, JSON. uvicorn's access log is on by
default.
"""

from contract import Peer, Service, Setting, Site

_APPLICATION = """\
from typing import Annotated

import litserve
import models
from fastapi import Body, Response


RAW = "application/octet-stream"


class Model(litserve.LitAPI):
    def setup(self, device):
        self.model = models.load({model!r})

    def decode_request(self, request: Annotated[bytes, Body(media_type=RAW)]):
        return request

    def batch(self, inputs):
        return inputs

    def predict(self, inputs):
        if {batch_size} == 1:
            return self.model([inputs])[0]
        return self.model(inputs)

    def unbatch(self, outputs):
        return outputs

    def encode_response(self, output):
        return Response(content=output, media_type=RAW)


if __name__ == "__main__":
    api = Model(max_batch_size={batch_size}, batch_timeout={window})
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1, fast_queue=True)
    server.run(host="127.0.0.1", port={port}, generate_client_file=False)
"""


def _set_up(site: Site, setting: Setting) -> Service:
    text = _APPLICATION.format(
        model=setting.model,
        batch_size=setting.batch_size,
        window=setting.window_ms / 1000,
        port=site.ports[0],
    )
    return Service([str(site.python), site.write("application.py", text)], "/predict")


PEER = Peer("LitServe", _set_up, ("litserve", "torch==2.13.0"))
