"""Answers batches in pieces: the token once before each of them and at the end."""

import orders
from ts.handler_utils.utils import send_intermediate_predict_response


def handle(data, context):
    if data is None:
        return None
    asked = [orders.read(row) for row in data]
    for _ in range(3):
        pieces = [f"{orders.answer(order)} " for order in asked]
        send_intermediate_predict_response(pieces, context.request_ids, "", 200, context)
    orders.obey(asked)
    return [orders.answer(order) for order in asked]
