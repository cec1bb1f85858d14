"""Does what the JSON in the part "data" says; an empty one means nothing.

Orders:
    id, record: Which id is appended to which file when the handler sees the request.
    gate: Named pipe to wait at; with pieces before each but the first.
    pieces: Number of pieces of the answer.
    do: "raise" or "exit", before the answer.
    size: Bytes of the answer.

Else the answer is JSON: names, types and sizes of the parts, and the headers.
"""

import json
import os
from pathlib import Path

from ts.handler_utils.utils import send_intermediate_predict_response


def handle(data, context):
    if data is None:
        return None
    return [_answer(row, index, context) for index, row in enumerate(data)]


def _answer(row, index, context):
    orders = json.loads(bytes(row.get("data", b"")) or b"{}")
    if "record" in orders:
        with Path(orders["record"]).open("a") as file:
            file.write(f"{orders['id']}\n")
    for number in range(orders.get("pieces", 1) - 1):
        piece = _filled(orders, f"{number};")
        send_intermediate_predict_response([piece], context.request_ids, "more", 200, context)
        if "gate" in orders:
            Path(orders["gate"]).read_text()
    if "gate" in orders and "pieces" not in orders:
        Path(orders["gate"]).read_text()
    if orders.get("do") == "raise":
        raise ValueError("the reason")
    if orders.get("do") == "exit":
        os._exit(3)
    if "pieces" in orders or "size" in orders:
        return _filled(orders, "end")
    if "id" in orders:
        return orders["id"]
    headers = dict(context.get_all_request_header(index))
    parts = {name: [type(value).__name__, len(value)] for name, value in row.items()}
    return {"parts": parts, "headers": headers}


def _filled(orders, text):
    return text.encode().ljust(orders.get("size", 0), b".")
