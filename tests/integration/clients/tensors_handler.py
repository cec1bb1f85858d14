"""Answers requests of the Open Inference Protocol in the way that the model's name asks for."""

import time

import numpy as np
import torch


def handle(data, context):
    if data is None:
        return None
    return [ANSWERS[context.model_name.partition("-")[0]](row["body"], context) for row in data]


def echo(body, context):
    """The protocol's document, with the data as it came."""
    names = ("name", "datatype", "shape", "data")
    return {"outputs": [{name: each[name] for name in names} for each in body["inputs"]]}


def arrays(body, context):
    """Arrays and tensors by name."""
    values = body["inputs"][0]["data"]
    return {
        "doubled": 2 * np.array(values, "float32"),
        "half": torch.tensor(values, dtype=torch.bfloat16),
        "labels": np.array([str(value) for value in values], object),
    }


def plain(body, context):
    """A list, which has no name."""
    return [2 * value for value in body["inputs"][0]["data"]]


def label(body, context):
    """What a classifier of TorchServe's answers."""
    return {"tabby": 0.75, "tiger_cat": 0.25}


def wrong(body, context):
    """Answers that cannot be sent, by the request's name for them."""
    kind = body["inputs"][0]["data"][0]
    if kind == "raises":
        raise ValueError("on purpose")
    if kind == "refuses":
        context.set_response_status(422, "Unprocessable", 0)
        return "no cats in it"
    data = {"datatype": "INT8", "shape": [1], "data": [1000]}
    if kind == "shape":
        data = {"datatype": "INT8", "shape": [2, 2], "data": [1, 2, 3]}
    elif kind == "datatype":
        data = {"datatype": "FP128", "shape": [1], "data": [1]}
    return {"outputs": [{"name": "y", **data}]}


def pieces(body, context):
    """An answer in pieces; the last one is what is returned."""
    *first, last = body["inputs"][0]["data"]
    for value in first:
        context.send_intermediate([np.array([value])])
    return np.array([last])


def sequence(body, context):
    """What the handler is told of a sequence."""
    names = ("ts_request_sequence_id", "ts_request_sequence_start", "ts_request_sequence_end")
    return [str(context.get_request_header(0, name)) for name in names]


def slow(body, context):
    """Takes as long as it is told."""
    time.sleep(body["inputs"][0]["data"][0])
    return [1.0]


ANSWERS = {
    function.__name__: function
    for function in (echo, arrays, plain, label, wrong, pieces, sequence, slow)
}
