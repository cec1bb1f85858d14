import subprocess
import sys
from collections import OrderedDict
from types import ModuleType

import pytest

from marserve.handlers.utils import (
    CLEANUP_REGEX,
    check_valid_pt2_backend,
    deprecated,
    get_yaml_config,
    import_class,
    list_classes_from_module,
)


@pytest.fixture
def module() -> ModuleType:
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
def test_import_class(name, prefix) -> None:
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
def test_import_class_finds_none(name, prefix) -> None:
    with pytest.raises(ImportError):
        import_class(name, prefix)


def test_only_classes_defined_in_a_module_are_listed(module: ModuleType) -> None:
    names = [item.__name__ for item in list_classes_from_module(module)]
    assert names == ["Ant", "Cat", "Tabby"]


def test_only_subclasses_are_listed(module: ModuleType) -> None:
    assert list_classes_from_module(module, module.Cat) == [module.Cat, module.Tabby]


@pytest.mark.parametrize(
    ("text", "config"), [("handler: {n: 1}", {"handler": {"n": 1}}), ("", {}), ("# only", {})]
)
def test_yaml(tmp_path, text, config) -> None:
    path = tmp_path / "model-config.yaml"
    path.write_text(text)
    assert get_yaml_config(str(path)) == config


def test_pt2_backends(caplog) -> None:
    assert check_valid_pt2_backend("inductor")
    assert caplog.text == ""
    assert not check_valid_pt2_backend("abacus")
    assert "abacus is not a supported backend" in caplog.text


def test_a_deprecated_function_works_and_warns() -> None:
    @deprecated("0.2", "double")
    def twice(n: int) -> int:
        return n * 2

    with pytest.warns(
        PendingDeprecationWarning, match=r"twice is deprecated since version 0.2.*double"
    ):
        assert twice(2) == 4
    assert twice.__name__ == "twice"


def test_a_deprecation_may_be_of_another_kind() -> None:
    @deprecated("0.2", klass=FutureWarning)
    def twice(n: int) -> int:
        return n * 2

    with pytest.warns(FutureWarning, match=r"twice is deprecated since version 0\.2\.$"):
        twice(2)


def test_tags_and_entities_are_cleaned() -> None:
    assert CLEANUP_REGEX.sub("", "<p class='x'>a&nbsp;b&#39;c&#xA0;d</p> & e") == "abcd & e"


def test_a_handler_without_tensors_does_not_load_torch() -> None:
    code = "import sys, marserve.handlers.utils; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
