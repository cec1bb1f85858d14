"""What the scripts of this folder share; they run in an environment with the clients, ours has not.

A script is called with the addresses of a server's listeners, calls each of its functions
``check_...``, and prints as JSON what became of each: nothing, or a traceback.
"""

import inspect
import json
import sys
import traceback

import ml_dtypes
import numpy as np

EVERY_DATATYPE = {
    "BOOL": np.array([[True, False, True]]),
    "INT8": np.array([-128, 127], "int8"),
    "INT16": np.array([[-(2**15)], [2**15 - 1]], "int16"),
    "INT32": np.array([-(2**31), 2**31 - 1], "int32"),
    "INT64": np.array([-(2**63), 2**63 - 1], "int64"),
    "UINT8": np.array([0, 255], "uint8"),
    "UINT16": np.array([0, 2**16 - 1], "uint16"),
    "UINT32": np.array([0, 2**32 - 1], "uint32"),
    "UINT64": np.array([0, 2**64 - 1], "uint64"),
    "FP16": np.array([[1.5, -2.25], [65504, np.inf]], "float16"),
    "BF16": np.array([1.5, -3.0, np.nan, np.inf], ml_dtypes.bfloat16),
    "FP32": np.array([0.1, -1e38, np.nan, -np.inf], "float32"),
    "FP64": np.array([0.1, 1e308, np.nan, 0.0], "float64"),
    "BYTES": np.array([[b"tabby", b""], [b"\xff\x00", "gr\u00fcn".encode()]], object),
}


def check_raises(call, sentence):
    """Check that a call fails, and says why."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - each client has its own
        said = str(error)
    else:
        said = "nothing"
    assert sentence in said, f"{sentence!r} is not in {said}"


def run_checks(members, make_client):
    """Call all checks with what they take of: client, and the addresses."""
    addresses = json.loads(sys.argv[1])
    results = {}
    for name, check in members.items():
        if not name.startswith("check_") or check is check_raises:
            continue
        try:
            wanted = inspect.signature(check).parameters
            if "client" not in wanted:
                check(**{key: addresses[key] for key in wanted})
                results[name] = ""
                continue
            with make_client(addresses) as client:
                known = {"client": client, **addresses}
                check(**{key: known[key] for key in wanted if key in known})
            results[name] = ""
        except Exception:  # noqa: BLE001 - it is told
            results[name] = traceback.format_exc()
    print(json.dumps(results))
