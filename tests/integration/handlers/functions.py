"""Functions for workflows: each says what it got, waits, fails, or answers as it is told."""

import json
import os
import signal
from pathlib import Path


def _texts(row):
    return {
        name: bytes(value).decode() if isinstance(value, (bytes, bytearray)) else value
        for name, value in row.items()
    }


def tell(data, context):
    """What it got: parts, a header, its id."""
    if data is None:
        return None
    return [
        json.dumps(
            {
                "parts": _texts(row),
                "header": context.get_request_header(place, "X-Word"),
                "id": context.get_request_id(place),
            }
        )
        for place, row in enumerate(data)
    ]


def repeat(data, context):
    """Its only part."""
    return data and [next(iter(row.values())) for row in data]


again = repeat


def text(data, context):
    return data and ["plain words"] * len(data)


def octets(data, context):
    return data and [b"\xff\xfe"] * len(data)


def items(data, context):
    return data and [[1, 2]] * len(data)


def created(data, context):
    """Sets status, phrase, type and a header."""
    if data is None:
        return None
    for place in range(len(data)):
        context.set_response_status(code=201, phrase="Made", idx=place)
        context.set_response_content_type(place, "text/plain")
        context.set_response_header(place, "X-Mine", "yes")
    return ["made"] * len(data)


def refuse(data, context):
    """Answers with an error status."""
    if data is None:
        return None
    for place in range(len(data)):
        context.set_response_status(code=422, idx=place)
    return ["not that"] * len(data)


def boom(data, context):
    if data is None:
        return
    raise ValueError("boom")


def _orders(row):
    body = next(iter(row.values()))
    if isinstance(body, (bytes, bytearray)):
        body = json.loads(bytes(body))
    return body


def _note(orders, name):
    if "record" in orders:
        with Path(orders["record"]).open("a") as file:
            file.write(f"{name}\n")


def gated(data, context):
    """Notes that it was called, waits at a gate, and passes its orders on."""
    if data is None:
        return None
    for row in data:
        orders = _orders(row)
        _note(orders, "gated")
        if "gate" in orders:
            Path(orders["gate"]).read_text()
    return [json.dumps(_orders(row)) for row in data]


def noted(data, context):
    """Notes that it was called, and passes its orders on."""
    if data is None:
        return None
    for row in data:
        _note(_orders(row), "noted")
    return [json.dumps(_orders(row)) for row in data]


def first_fails(data, context):
    """Fails at its first call."""
    if data is None:
        return None
    for row in data:
        orders = _orders(row)
        _note(orders, "first_fails")
        if Path(orders["record"]).read_text().count("first_fails") == 1:
            raise ValueError("not yet")
    return ["{}"] * len(data)


def first_dies(data, context):
    """Ends its process at its first call."""
    if data is None:
        return None
    for row in data:
        orders = _orders(row)
        _note(orders, "first_dies")
        if Path(orders["record"]).read_text().count("first_dies") == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    return ["{}"] * len(data)


def fails_when_told(data, context):
    """Waits at a gate of its own, then fails."""
    if data is None:
        return
    for row in data:
        Path(_orders(row)["failing"]).read_text()
        raise ValueError("told so")
    return


def streams(data, context):
    """Answers in three pieces."""
    if data is None:
        return None
    from ts.handler_utils.utils import send_intermediate_predict_response

    for piece in ("one ", "two "):
        send_intermediate_predict_response(
            [piece] * len(data), context.request_ids, "Intermediate", 200, context
        )
    return ["three"] * len(data)
