"""Sends as many intermediate answers as the request says, then a last one.

A request is a JSON object: `pieces`, and optionally `fail` after them, `headers`, `status`, `wait`
seconds between the pieces.
"""

import os
import time

from ts.handler_utils.utils import send_intermediate_predict_response


def handle(data, context):
    if data is None:
        return None
    orders = [row["body"] for row in data]
    for index, order in enumerate(orders):
        for name, value in order.get("headers", {}).items():
            context.set_response_header(index, name, value)
        if "status" in order:
            context.set_response_status(*order["status"], idx=index)
    for number in range(max(order["pieces"] for order in orders)):
        pieces = [f"{order.get('name', '')}piece {number};" for order in orders]
        send_intermediate_predict_response(pieces, context.request_ids, "Prediction", 200, context)
        # Two pieces that lie in the socket together may leave as one chunk; they are two events.
        time.sleep(orders[0].get("wait", 0.2))
    _fail(orders[0].get("fail"))
    return [f"{order.get('name', '')}last" for order in orders]


def _fail(how):
    if how == "raise":
        raise ValueError("in the middle of a stream")
    if how == "die":
        os._exit(1)
