import sys

import pytest

from marserve.handlers.engines.optional import first_of, need


@pytest.fixture
def broken(tmp_path, monkeypatch):
    """An installed package whose module imports something that is not there."""
    package = tmp_path / f"broken_{tmp_path.name}"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "part.py").write_text("import nowhere_at_all")
    monkeypatch.syspath_prepend(tmp_path)
    yield package.name
    for name in [item for item in sys.modules if item.startswith(package.name)]:
        del sys.modules[name]


def test_what_is_there_is_imported() -> None:
    assert need("json.decoder", "json", "this test").__name__ == "json.decoder"


@pytest.mark.parametrize("module", ["nowhere", "nowhere.deeper"])
def test_what_to_install_is_in_the_message(module) -> None:
    with pytest.raises(
        ImportError,
        match=r"^some_handler needs the package no-where, which is not installed: "
        r"pip install no-where$",
    ):
        need(module, "no-where", "some_handler")


def test_what_an_installed_package_lacks_is_its_own_affair(broken) -> None:
    with pytest.raises(ModuleNotFoundError, match="nowhere_at_all"):
        need(f"{broken}.part", broken, "some_handler")
    with pytest.raises(ModuleNotFoundError, match="nowhere_at_all"):
        first_of([f"{broken}.part", "json"], broken, "some_handler")


def test_the_first_module_that_there_is() -> None:
    assert first_of(["json.moved", "json.decoder"], "json", "x").__name__ == "json.decoder"


def test_none_of_the_modules() -> None:
    with pytest.raises(ImportError, match=r"x needs a release of json with json\.a or json\.b"):
        first_of(["json.a", "json.b"], "json", "x")
    with pytest.raises(ImportError, match="needs the package nowhere"):
        first_of(["nowhere.a", "nowhere.b"], "nowhere", "x")
