import json

import pytest

from marserve.handlers.labels import load_label_mapping, map_class_to_label


@pytest.mark.parametrize(
    ("content", "mapping"),
    [
        ({"0": "tabby", "1": "tiger"}, {"0": "tabby", "1": "tiger"}),
        ({"0": ["n02123045", "tabby"]}, {"0": "tabby"}),
        ({"object_type_names": ["tabby", "tiger"]}, {"0": "tabby", "1": "tiger"}),
        ({}, {}),
    ],
)
def test_the_forms_of_index_to_name(tmp_path, content, mapping) -> None:
    path = tmp_path / "index_to_name.json"
    path.write_text(json.dumps(content))
    assert load_label_mapping(str(path)) == mapping


def test_a_missing_file_is_a_warning(tmp_path, caplog) -> None:
    assert load_label_mapping(tmp_path / "index_to_name.json") is None
    assert "is missing. Inference output will not include class name." in caplog.text


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (["tabby"], "should be in"),
        ({"0": 1}, "must be either"),
        ({"0": []}, "must be either"),
        ({"0": {"name": "tabby"}}, "must be either"),
    ],
)
def test_other_contents_are_refused(tmp_path, content, sentence) -> None:
    path = tmp_path / "index_to_name.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=sentence):
        load_label_mapping(path)


def test_names_are_put_to_values_row_by_row() -> None:
    mapping = {"0": "tabby", "1": "tiger", "2": "lynx"}
    rows = map_class_to_label([[0.9, 0.1], [0.7, 0.3]], mapping, [[2, 0], [1, 2]])
    assert rows == [{"lynx": 0.9, "tabby": 0.1}, {"tiger": 0.7, "lynx": 0.3}]
    assert [list(row) for row in rows] == [["lynx", "tabby"], ["tiger", "lynx"]]


def test_without_a_mapping_the_index_is_the_name() -> None:
    assert map_class_to_label([[0.9, 0.1]]) == [{"0": 0.9, "1": 0.1}]


def test_without_classes_they_count_up() -> None:
    assert map_class_to_label([[0.9, 0.1]], {"0": "a", "1": "b"}) == [{"a": 0.9, "b": 0.1}]


def test_a_class_without_a_name() -> None:
    with pytest.raises(KeyError, match="1"):
        map_class_to_label([[0.9, 0.1]], {"0": "a"})


@pytest.mark.parametrize(("probs", "mapping"), [(((0.5,),), None), ([[0.5]], ["a"])])
def test_wrong_types(probs, mapping) -> None:
    with pytest.raises(TypeError):
        map_class_to_label(probs, mapping)
