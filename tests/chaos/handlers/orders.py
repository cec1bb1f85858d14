"""What the handlers of the campaign have in common; packed with each of them.

A request is a JSON object: ``token`` and ``repeat`` say what is answered, ``ms`` how long it takes,
``do`` what goes wrong. A ``filler`` makes request and answer large; the answer has its digest, too.
"""

import hashlib
import json
import os
import subprocess
import sys
import threading
import time

from ts.utils.util import PredictionException

_poison = ""


def read(row):
    order = row["body"] if "body" in row else row["data"]
    return json.loads(bytes(order)) if isinstance(order, bytes | bytearray) else order


def answer(order):
    words = [order["token"]] * order.get("repeat", 1)
    if filler := order.get("filler"):
        words += [hashlib.sha256(filler.encode()).hexdigest(), filler]
    return " ".join(words)


def obey(orders):
    """Take the time that is asked for, and do what is wrong with any of them."""
    global _poison
    time.sleep(max(order.get("ms", 1) for order in orders) / 1000)
    for order in orders:
        if order.get("do") == "poison":
            _poison = "CUDA error: device-side assert triggered"
    if _poison:
        raise RuntimeError(_poison)
    for order in orders:
        if "do" in order:
            MISDEEDS[order["do"]](order)


def _raise(order):
    raise ValueError(order["token"])


def _refuse(order):
    raise PredictionException(order["token"], 418)


def _leave_child(order):
    """A grandchild of the server that nobody waits for."""
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    child.returncode = 0


def _exhaust_memory(order):
    raise MemoryError


MISDEEDS = {
    "raise": _raise,
    "refuse": _refuse,
    "memory": _exhaust_memory,
    "exit": lambda order: os._exit(3),
    "sys.exit": lambda order: sys.exit(4),
    "hang": lambda order: threading.Event().wait(),
    "child": _leave_child,
}
