"""Ray Serve: uvicorn in a proxy actor before replica actors, on a cluster of this machine only.

One replica; ``serve.batch`` forms batches inside it. The handler reads the raw body from the
Starlette request and answers with a Response, which its documentation names as the cheapest way.
``RAY_SERVE_THROUGHPUT_OPTIMIZED`` is what its performance guide recommends for throughput: user
code on the replica's own loop, buffered request logs. The dashboard and usage reports are off.
"""

from contract import Peer, Service, Setting, Site

_APPLICATION = """\
import signal

import models
import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import Response


@serve.deployment(num_replicas=1, max_ongoing_requests=256, ray_actor_options={{"num_cpus": 1}})
class Model:
    def __init__(self):
        self.model = models.load({model!r})

    @serve.batch(max_batch_size={batch_size}, batch_wait_timeout_s={window})
    async def predict(self, bodies):
        return self.model(bodies)

    async def __call__(self, request: Request):
        body = await request.body()
        answer = self.model([body])[0] if {batch_size} == 1 else await self.predict(body)
        return Response(answer, media_type="application/octet-stream")


if __name__ == "__main__":
    ray.init(
        _node_ip_address="127.0.0.1",
        include_dashboard=False,
        _temp_dir={directory!r},
        runtime_env={{"env_vars": {{"PYTHONPATH": {directory!r}}}}},
    )
    serve.start(http_options={{"host": "127.0.0.1", "port": {port}}})
    serve.run(Model.bind())
    signal.sigwait([signal.SIGTERM, signal.SIGINT])
    ray.shutdown()
"""


def _set_up(site: Site, setting: Setting) -> Service:
    text = _APPLICATION.format(
        model=setting.model,
        batch_size=setting.batch_size,
        window=setting.window_ms / 1000,
        port=site.ports[0],
        directory=str(site.directory),
    )
    environment = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "PYTHONPATH": str(site.directory),
    }
    return Service([str(site.python), site.write("application.py", text)], "/", environment)


PEER = Peer("Ray Serve", _set_up, ("ray[serve]", "torch==2.13.0"))
