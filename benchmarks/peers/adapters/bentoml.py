"""BentoML: Starlette on uvicorn; the service runs in the same process as its front.

One worker (its default). A batchable API takes lists and is given one item per request; its
dispatcher is adaptive and knows no fixed window: it waits as long as it believes to pay, at most
``max_latency_ms``, beyond which it answers 503. So that is left at its default of a minute; the
window of the case has no counterpart. Batchable APIs take and give JSON, so the body travels as one
string in a list. Usage reports are off.
"""

import json

from contract import Peer, Service, Setting, Site

_SERVICE = """\
import bentoml
import models


@bentoml.service(workers=1)
class Model:
    def __init__(self):
        self.model = models.load({model!r})

    @bentoml.api({batching})
    def predict(self, bodies: list[str]) -> list[str]:
        return [one.decode() for one in self.model([one.encode() for one in bodies])]
"""


def _set_up(site: Site, setting: Setting) -> Service:
    size = setting.batch_size
    batching = f"batchable=True, max_batch_size={size}" if size > 1 else ""
    site.write("service.py", _SERVICE.format(model=setting.model, batching=batching))
    command = [site.program("bentoml"), "serve", "service:Model", "--host", "127.0.0.1"]
    command += ["--port", str(site.ports[0])]
    environment = {
        "BENTOML_DO_NOT_TRACK": "True",
        "BENTOML_HOME": str(site.directory / "home"),
    }
    return Service(command, "/predict", environment, "application/json", _encode, _decode)


def _encode(body: bytes) -> bytes:
    return json.dumps({"bodies": [body.decode()]}).encode()


def _decode(answer: bytes) -> bytes:
    text: str = json.loads(answer)[0]
    return text.encode()


PEER = Peer(
    "BentoML", _set_up, ("bentoml", "torch==2.13.0"), note="JSON: one string in a list; no window"
)
