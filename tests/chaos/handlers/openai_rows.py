"""Answers the items of OpenAI's lists: an embedding or a score, made of all that an item has."""

import hashlib
import json

import orders


def handle(data, context):
    if data is None:
        return None
    rows = [row["body"] for row in data]
    asked = [json.loads(row["document"] if isinstance(row, dict) else row) for row in rows]
    orders.obey(asked)
    return [answer(row, orders.answer(order)) for row, order in zip(rows, asked, strict=True)]


def answer(row, text):
    query = row["query"] if isinstance(row, dict) else ""
    digest = hashlib.sha256((query + text).encode()).digest()
    if query:
        return {"score": int.from_bytes(digest[:4], "big"), "tokens": 1}
    return {"embedding": list(digest), "tokens": 1}
