"""Asks a server by the Open Inference Protocol over HTTP, with tensors as bytes."""

import json
import struct
from typing import Any

import numpy as np

CUT = "dynamicBatchSize: true\n"
DATATYPES = {"<f4": "FP32", "<i8": "INT64", "|u1": "UINT8", "<f2": "FP16", "<f8": "FP64"}
DTYPES = {name: dtype for dtype, name in DATATYPES.items()}


def infer(server: Any, name: str, *inputs: Any, **head: Any) -> Any:
    """Ask with tensors behind the JSON."""
    described, buffers = [], []
    for number, array in enumerate(inputs):
        raw = array.tobytes()
        entry = {"name": f"x{number}", "datatype": DATATYPES[array.dtype.str], "shape": array.shape}
        described.append({**entry, "parameters": {"binary_data_size": len(raw)}})
        buffers.append(raw)
    parameters = {"binary_data_output": True}
    text = json.dumps({"inputs": described, "parameters": parameters, **head}).encode()
    headers = {"Inference-Header-Content-Length": str(len(text))}
    body = b"".join([text, *buffers])
    return server.inference("POST", f"/v2/models/{name}/infer", data=body, headers=headers)


def arrays_in(answer: Any) -> dict[str, Any]:
    """The outputs of an answer with tensors behind its JSON."""
    assert answer.status_code == 200, answer.text
    at = int(answer.headers["Inference-Header-Content-Length"])
    head = json.loads(answer.content[:at])
    found: dict[str, Any] = {}
    for output in head["outputs"]:
        if (size := output.get("parameters", {}).get("binary_data_size")) is None:
            found[output["name"]] = np.array(output["data"], object).reshape(output["shape"])
            continue
        raw, at = answer.content[at : at + size], at + size
        if output["datatype"] == "BYTES":
            texts: list[str] = []
            while raw:
                (length,) = struct.unpack_from("<I", raw)
                texts.append(raw[4 : 4 + length].decode())
                raw = raw[4 + length :]
            array: Any = np.array(texts, object)
        else:
            array = np.frombuffer(raw, DTYPES[output["datatype"]])
        found[output["name"]] = array.reshape(output["shape"])
    return found


def numbered(rows: int, columns: int = 2) -> Any:
    """Rows whose numbers are all different."""
    return np.arange(rows * columns, dtype="float32").reshape(rows, columns)
