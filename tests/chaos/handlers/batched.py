"""Answers batches."""

import orders


def handle(data, context):
    if data is None:
        return None
    asked = [orders.read(row) for row in data]
    orders.obey(asked)
    return [orders.answer(order) for order in asked]
