"""marserve as it is in this tree, with the archive and the configuration that TorchServe gets.

The adaptive policy is asked for by its name alone; batch size and window stay.
"""

from archive import pack_model, properties
from contract import Peer, Service, Setting, Site


def _set_up(site: Site, setting: Setting) -> Service:
    pack_model(site, setting)
    site.write("config.properties", properties(site, setting, {"batchPolicy": setting.policy}))
    command = [
        site.program("marserve"),
        "--foreground",
        "--ncs",
        "--ts-config",
        "config.properties",
    ]
    return Service(command, "/predictions/model")


PEER = Peer("marserve", _set_up)
