import datetime as dt
import json
import sys
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import pytest

from marserve.backend.context import RequestProcessor
from marserve.backend.conversion import Conversion, describe_unsendable, encode_result


def test_a_tensor_is_saved_the_way_torch_does(monkeypatch):
    class Tensor(list[int]):
        pass

    def save(tensor, file):
        file.write(b"saved" + bytes(tensor))

    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(Tensor=Tensor, save=save))
    assert encode_result(Tensor([1, 2])) == b"saved\x01\x02"
    assert encode_result([1]) == b"[\n  1\n]"


def deep() -> list[Any]:
    value: list[Any] = [{1}]
    for _ in range(100_000):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("result", "why"),
    [
        ({"a": [1, {"b": {2}}]}, 'prediction["a"][1]["b"] is of type set.'),
        ([[None, 1.5, True], (b"x",)], "prediction[1][0] is of type bytes."),
        ({"when": dt.date(2024, 1, 1)}, 'prediction["when"] is a datetime.date.'),
        ({7: object()}, "prediction[7] is of type object."),
        ({"a": {b"k": 1}}, 'prediction["a"] has a key that is of type bytes.'),
        (OrderedDict(a=int), 'prediction["a"] is of type type.'),
        ({"k" * 60: {1}}, f'prediction["{"k" * 39}…"] is of type set.'),
        (deep(), "The prediction is nested too deeply."),
        ("\ud800", "prediction is text that UTF-8 cannot encode."),
    ],
)
def test_the_place_that_cannot_be_encoded_is_reported(result, why):
    assert describe_unsendable(result) == why


def test_an_object_that_fails_again_when_it_is_looked_at_is_not_reported():
    class Odd:
        @property
        def __class__(self):
            raise RuntimeError("no class")

    assert describe_unsendable([Odd()]) == ""


def test_a_place_of_many_steps_is_shortened():
    result = {1}
    for _ in range(50):
        result = {"abcdefgh": result}
    why = describe_unsendable(result)
    assert why.startswith('prediction["abcdefgh"]')
    assert why.endswith('["abcdefgh"] is of type set.')
    assert len(why) < 250


def test_numpys_scalars_and_arrays_are_encoded():
    np = pytest.importorskip("numpy")
    result = {
        "class": np.int64(7),
        "score": np.float32(0.5),
        "sure": np.bool_(True),
        "box": np.arange(4).reshape(2, 2),
        "empty": np.array([]),
        "labels": np.array(["cat", "dog"]),
    }
    assert json.loads(bytes(encode_result(result))) == {
        "class": 7,
        "score": 0.5,
        "sure": True,
        "box": [[0, 1], [2, 3]],
        "empty": [],
        "labels": ["cat", "dog"],
    }
    assert json.loads(bytes(encode_result(np.float32(0.5)))) == 0.5
    assert json.loads(bytes(encode_result(np.ones(2)))) == [1.0, 1.0]


def test_what_numpy_holds_that_json_cannot_is_reported():
    np = pytest.importorskip("numpy")
    objects = {"a": np.array([1, {2}], dtype=object)}
    with pytest.raises(TypeError):
        encode_result(objects)
    assert describe_unsendable(objects) == 'prediction["a"][1] is of type set.'
    assert describe_unsendable([np.longdouble(1)]) == "prediction[0] is a numpy.longdouble."
    assert describe_unsendable({np.int64(1): 2}) == "prediction has a key that is a numpy.int64."


def test_tensors_of_one_element_are_numbers_and_others_are_reported():
    torch = pytest.importorskip("torch")
    result = {"loss": torch.tensor(0.5), "class": torch.tensor([[3]])}
    assert json.loads(bytes(encode_result(result))) == {"loss": 0.5, "class": 3}
    with pytest.raises(TypeError):
        encode_result([{"mask": torch.zeros(1, 2, 2)}])
    assert describe_unsendable([{"mask": torch.zeros(1, 2, 2)}]) == (
        'prediction[0]["mask"] is a torch.Tensor of 3 dimensions.'
    )
    assert (
        describe_unsendable((torch.zeros(2),)) == "prediction[0] is a torch.Tensor of 1 dimension."
    )


def test_a_tensor_without_data_is_reported():
    torch = pytest.importorskip("torch")
    result = {"loss": torch.ones(1, device="meta")}
    with pytest.raises(RuntimeError):
        encode_result(result)
    assert describe_unsendable(result) == 'prediction["loss"] is a torch.Tensor of 1 dimension.'


def test_more_headers_than_clients_read_are_refused_with_what_is_accepted():
    processor = RequestProcessor({})
    for number in range(1001):
        processor.add_response_property(f"x-{number:04}", "y")
    prediction = Conversion(True, 1000).prediction(0, "result", processor)
    assert prediction.status == 500
    assert json.loads(bytes(prediction.body))["message"] == (
        "The handler set 1001 headers with 7007 characters in all; "
        "at most 1000 headers with 65536 characters are accepted."
    )
