"""mosec: a Rust front, Python workers behind it on a unix socket.

One worker; ``deserialize`` and ``serialize`` are overridden, so raw bytes go in and out (its
default is JSON). With a batch size of 1 ``forward`` gets one item, else a list. Logging as by
default: it has no access log.
"""

from contract import Peer, Service, Setting, Site

_APPLICATION = """\
import models
from mosec import Server, Worker


class Model(Worker):
    def __init__(self):
        super().__init__()
        self.model = models.load({model!r})

    def deserialize(self, data):
        return data

    def serialize(self, data):
        return data

    def forward(self, data):
        if {batch_size} == 1:
            return self.model([data])[0]
        return self.model(data)


if __name__ == "__main__":
    server = Server()
    server.append_worker(Model, num=1, max_batch_size={batch_size}, max_wait_time={window_ms})
    server.run()
"""


def _set_up(site: Site, setting: Setting) -> Service:
    # A window of 0 is refused; without company to wait for it has no effect.
    window = max(1, setting.window_ms)
    text = _APPLICATION.format(model=setting.model, batch_size=setting.batch_size, window_ms=window)
    command = [str(site.python), site.write("application.py", text)]
    command += ["--address", "127.0.0.1", "--port", str(site.ports[0])]
    return Service(command, "/inference")


PEER = Peer("mosec", _set_up, ("mosec", "torch==2.13.0"))
