import json
from typing import Any

import numpy as np
import pytest
import torch
from fed_decoder import Decoder

from marserve.backend.conversion import Conversion
from marserve.backend.framing import encode
from marserve.backend.protocol import TENSORS_TYPE, Input, Part, Predict
from marserve.backend.tensors.stacking import Stacking, stacked_results
from marserve.backend.tensors.wire import SIZE, pack_request

CONVERSION = Conversion(True, 1000)


def block_of(x: Any) -> Input:
    tensor = {"name": "x", "datatype": "FP32", "shape": list(x.shape)}
    head = {"inputs": [{**tensor, "parameters": {SIZE: x.nbytes}}]}
    return Input(
        "id.0", {}, [Part("body", TENSORS_TYPE, b"".join(pack_request(head, [x.tobytes()])))]
    )


@pytest.mark.parametrize("rows", [3, 3000])
@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("id_", ["i", "id", "i" * 7, "i" * 14])
def test_one_block_is_used_where_it_was_received(rows, library, id_):
    x = np.arange(rows * 8, dtype="float32").reshape(rows, 8)
    block = block_of(x)
    block.id = id_
    decoder = Decoder(1 << 30)
    [received] = decoder.feed(b"".join(encode(Predict([block], 1, rows=[rows]))))
    assert isinstance(received, Predict)
    batch = Stacking(library, 0, []).read(CONVERSION.row, received.inputs, received.rows)
    assert batch.whole is not None
    found = np.asarray(batch.whole.arrays(0)["x"])
    np.testing.assert_array_equal(found, x)
    assert np.shares_memory(found, np.frombuffer(received.inputs[0].parts[0].body, "u1"))


def test_kinds_of_rows_are_kept_apart():
    inputs = [block_of(np.ones([2, 3], "f4")), block_of(np.ones([1, 4], "f4"))]
    inputs += [
        Input("j", {}, [Part("body", "application/json", json.dumps(value).encode())])
        for value in ({"x": [1.5, 2.5, 3.5]}, "text", {"x": [1, 2, 3], "y": 5})
    ]
    declared = [{"name": "x", "datatype": "FP32", "shape": [-1, -1]}]
    batch = Stacking("numpy", 0, declared).read(CONVERSION.row, inputs, [2, 1, 1, 1, 1])
    assert batch.whole is None
    assert [stack.places for stack in batch.stacks] == [[0, 2], [1], [4]]
    assert list(batch.refused) == [3]
    assert batch.stacks[0].arrays(4)["x"].tolist() == [[1] * 3, [1] * 3] + [[1.5, 2.5, 3.5]] * 2


@pytest.mark.parametrize(
    "results", [None, {}, {"a": 5}, {"a": np.ones(2), "b": np.ones(3)}, np.float32(1), "text"]
)
def test_what_is_no_arrays_of_rows(results):
    assert stacked_results(results, 0) is None
    assert stacked_results(np.ones(2), 1) is None


def test_arrays_keep_their_rows_wherever_these_are():
    found = stacked_results({"a": np.arange(6).reshape(2, 3), "b": torch.ones(1, 3)}, 1)
    assert found is not None
    assert len(found) == 3
    assert found.plain_row(1) == {"a": [1, 4], "b": [1.0]}
    assert found.tensor_row(1)["a"].tolist() == [[1], [4]]
    outputs = found.outputs(1, 2, "")
    assert [(output.name, output.shape) for output in outputs] == [("a", [2, 2]), ("b", [1, 2])]
