"""A handler whose stages a test can hold up: by flag files, in a directory that requests name.

A request is ``{"id": …, "flags": directory}``, and with ``"fail": {stage: how}`` a stage of its
batch raises, or ends the process. Every stage that is entered is written to ``record`` in that
directory, with the number of its thread.
"""

import sys
import threading
import time
from pathlib import Path

from ts.handler_utils.timer import timed
from ts.torch_handler.base_handler import BaseHandler

from marserve.backend.errors import PredictionException


class Staged(BaseHandler):
    def initialize(self, context):
        self.context = context
        self.device = "cpu"
        self.initialized = True

    @timed
    def preprocess(self, data):
        orders = [row["body"] for row in data]
        return self._pass("preprocess", orders)

    @timed
    def inference(self, data):
        return self._pass("inference", data)

    @timed
    def postprocess(self, data):
        self._pass("postprocess", data)
        return [f"{order['id']} of {len(self.context.request_ids)}" for order in data]

    def explain_handle(self, data_preprocess, raw_data):
        return self._pass("explain", data_preprocess)

    def _pass(self, stage, orders):
        for order in orders:
            flags = Path(order["flags"])
            with (flags / "record").open("a") as record:
                record.write(f"{stage} {order['id']} {threading.current_thread().name}\n")
            while (flags / f"{stage}-{order['id']}").exists():
                time.sleep(0.005)
            self._fail(order.get("fail", {}).get(stage))
        return orders

    def _fail(self, how):
        if how == "raise":
            raise ValueError("broken")
        if how == "404":
            raise PredictionException("not here", 404)
        if how == "exit":
            sys.exit(3)
