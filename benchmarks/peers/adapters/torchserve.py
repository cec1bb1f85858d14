"""TorchServe 0.12, the last release.

Started in the foreground with a config.properties, as its container image does; the model's worker,
batch size and delay stand in ``models``. Archive and configuration are what marserve gets. Nothing
else is set: its JVM, netty and log4j defaults are what its documentation recommends to begin with,
and its access, model and metrics logs are on by default. Token authorisation is off, as it is for
marserve on loopback. Its workers' sockets lie in Java's temporary directory.
"""

from archive import pack_model, properties
from contract import Peer, Service, Setting, Site


def _set_up(site: Site, setting: Setting) -> Service:
    pack_model(site, setting)
    more = {"disable_token_authorization": "true"}
    site.write("config.properties", properties(site, setting, more=more))
    command = [site.program("torchserve"), "--start", "--foreground", "--ncs"]
    command += ["--ts-config", "config.properties"]
    return Service(command, "/predictions/model", {"TEMP": str(site.directory)})


# Its worker imports yaml, which its package does not require.
_PACKAGES = ("torchserve==0.12.0", "torch-model-archiver", "torch==2.13.0", "numpy", "pyyaml")
PEER = Peer("TorchServe", _set_up, _PACKAGES)
