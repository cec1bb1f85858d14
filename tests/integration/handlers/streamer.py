"""Answers in pieces. A request is a JSON object: id, pieces, gate (waited at before each but the
first), fail ("raise" or "exit", before the last)."""

import os
from pathlib import Path

from ts.handler_utils.utils import send_intermediate_predict_response


def handle(data, context):
    if data is None:
        return None
    orders = [row["body"] for row in data]
    for number in range(max(order["pieces"] for order in orders) - 1):
        pieces = [f"{order['id']}{number};" for order in orders]
        send_intermediate_predict_response(pieces, context.request_ids, "more", 200, context)
        for order in orders:
            if "gate" in order:
                Path(order["gate"]).read_text()
    for order in orders:
        if order.get("fail") == "raise":
            raise ValueError
        if order.get("fail") == "exit":
            os._exit(3)
    return [f"{order['id']}end" for order in orders]
