"""No model server: aiohttp with one route that answers with the body. The yardstick.

It runs in the benchmark's own environment, on uvloop, without access log.
"""

from pathlib import Path

from contract import Peer, Service, Setting, Site

_ECHO = Path(__file__).parents[2] / "echo.py"


def _set_up(site: Site, _setting: Setting) -> Service:
    command = [str(site.python), str(_ECHO), "application", str(site.ports[0])]
    return Service(command, "/echo")


PEER = Peer("aiohttp", _set_up, models=frozenset({"echo"}), note="an echo, no model server")
