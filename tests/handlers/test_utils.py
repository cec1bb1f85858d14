import json
import subprocess
import sys
from collections import OrderedDict
from types import ModuleType, SimpleNamespace

import pytest
import yaml

from marserve.handlers.utils import (
    CLEANUP_REGEX,
    check_valid_pt2_backend,
    deprecated,
    get_yaml_config,
    import_class,
    list_classes_from_module,
    load_label_mapping,
    map_class_to_label,
    value_of,
)


@pytest.fixture
def module():
    module = ModuleType("animals")
    exec(
        "from collections import OrderedDict\n"
        "class Cat: ...\nclass Tabby(Cat): ...\nclass Ant: ...",
        module.__dict__,
    )
    return module


@pytest.mark.parametrize(
    ("name", "prefix"),
    [
        ("collections.OrderedDict", None),
        ("OrderedDict", "collections"),
    ],
)
def test_import_class(name, prefix):
    assert import_class(name, prefix) is OrderedDict


@pytest.mark.parametrize(
    ("name", "prefix"),
    [
        ("OrderedDict", None),
        ("nowhere.Cat", None),
        ("collections.Cat", None),
        ("Cat", "collections"),
        ("collections.namedtuple", None),  # a function
    ],
)
def test_import_class_raises_for_missing_classes(name, prefix):
    with pytest.raises(ImportError):
        import_class(name, prefix)


def test_only_classes_defined_in_a_module_are_listed(module):
    names = [item.__name__ for item in list_classes_from_module(module)]
    assert names == ["Ant", "Cat", "Tabby"]


def test_only_subclasses_are_listed(module):
    assert list_classes_from_module(module, module.Cat) == [module.Cat, module.Tabby]


@pytest.mark.parametrize(
    ("text", "config"), [("handler: {n: 1}", {"handler": {"n": 1}}), ("", {}), ("# only", {})]
)
def test_yaml(tmp_path, text, config):
    path = tmp_path / "model-config.yaml"
    path.write_text(text)
    assert get_yaml_config(str(path)) == config


def test_pt2_backends(caplog):
    assert check_valid_pt2_backend("inductor")
    assert caplog.text == ""
    assert not check_valid_pt2_backend("abacus")
    assert "abacus is not a supported backend" in caplog.text


def test_a_deprecated_function_works_and_warns():
    @deprecated("0.2", "double")
    def twice(n):
        return n * 2

    with pytest.warns(
        PendingDeprecationWarning, match=r"twice is deprecated since version 0.2.*double"
    ):
        assert twice(2) == 4
    assert twice.__name__ == "twice"


def test_a_deprecation_may_be_of_another_kind():
    @deprecated("0.2", klass=FutureWarning)
    def twice(n):
        return n * 2

    with pytest.warns(FutureWarning, match=r"twice is deprecated since version 0\.2\.$"):
        twice(2)


def test_tags_and_entities_are_cleaned():
    assert CLEANUP_REGEX.sub("", "<p class='x'>a&nbsp;b&#39;c&#xA0;d</p> & e") == "abcd & e"


def test_a_handler_without_tensors_does_not_load_torch():
    code = "import sys, marserve.handlers.utils; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("content", "mapping"),
    [
        ({"0": "tabby", "1": "tiger"}, {"0": "tabby", "1": "tiger"}),
        ({"0": ["n02123045", "tabby"]}, {"0": "tabby"}),
        ({"object_type_names": ["tabby", "tiger"]}, {"0": "tabby", "1": "tiger"}),
        ({}, {}),
    ],
)
def test_the_forms_of_index_to_name(tmp_path, content, mapping):
    path = tmp_path / "index_to_name.json"
    path.write_text(json.dumps(content))
    assert load_label_mapping(str(path)) == mapping


def test_a_missing_file_is_a_warning(tmp_path, caplog):
    assert load_label_mapping(tmp_path / "index_to_name.json") is None
    sentence = "'index_to_name.json' is missing. Inference output will not include class name."
    assert caplog.messages == [sentence]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (["tabby"], "should be in"),
        ({"0": 1}, "must be either"),
        ({"0": []}, "must be either"),
        ({"0": {"name": "tabby"}}, "must be either"),
    ],
)
def test_other_contents_are_refused(tmp_path, content, sentence):
    path = tmp_path / "index_to_name.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=f"^index_to_name.json: .*{sentence}"):
        load_label_mapping(path)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_files_of_a_model_may_have_a_byte_order_mark(tmp_path, encoding):
    labels, config = tmp_path / "index_to_name.json", tmp_path / "model-config.yaml"
    labels.write_text('{"0": "Kätzchen"}', encoding=encoding)
    config.write_text("handler:\n  name: Kätzchen\n", encoding=encoding)
    assert load_label_mapping(labels) == {"0": "Kätzchen"}
    assert get_yaml_config(config) == {"handler": {"name": "Kätzchen"}}


@pytest.mark.parametrize("content", [b"", b"{", b"[" * 100_000, b"\xff\xff{}", b"\0"])
def test_a_damaged_file_of_a_model_is_named(tmp_path, content):
    path = tmp_path / "index_to_name.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"^index_to_name.json is not valid JSON: "):
        load_label_mapping(path)


@pytest.mark.parametrize("content", [b"a: [", b"a: \xff", b"a: \0"])
def test_a_damaged_yaml_is_named(tmp_path, content):
    path = tmp_path / "model-config.yaml"
    path.write_bytes(content)
    with pytest.raises(yaml.YAMLError, match=r"^model-config.yaml is not valid YAML: "):
        get_yaml_config(path)


def test_values_get_names_by_row():
    mapping = {"0": "tabby", "1": "tiger", "2": "lynx"}
    rows = map_class_to_label([[0.9, 0.1], [0.7, 0.3]], mapping, [[2, 0], [1, 2]])
    assert rows == [{"lynx": 0.9, "tabby": 0.1}, {"tiger": 0.7, "lynx": 0.3}]
    assert [list(row) for row in rows] == [["lynx", "tabby"], ["tiger", "lynx"]]


def test_without_a_mapping_the_index_is_the_name():
    assert map_class_to_label([[0.9, 0.1]]) == [{"0": 0.9, "1": 0.1}]


def test_the_default_classes_are_0_1_2():
    assert map_class_to_label([[0.9, 0.1]], {"0": "a", "1": "b"}) == [{"a": 0.9, "b": 0.1}]


def test_a_class_without_a_name():
    with pytest.raises(KeyError, match="1"):
        map_class_to_label([[0.9, 0.1]], {"0": "a"})


@pytest.mark.parametrize(("probs", "mapping"), [(((0.5,),), None), ([[0.5]], ["a"])])
def test_wrong_types(probs, mapping):
    with pytest.raises(TypeError):
        map_class_to_label(probs, mapping)


def test_value_of_needs_only_get():
    """A replacement of a dict in tests of handlers."""
    assert value_of(SimpleNamespace(get={"body": b"x"}.get)) == b"x"
    assert value_of([1.0]) == [1.0]
