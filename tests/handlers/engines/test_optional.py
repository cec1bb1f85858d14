import sys

import pytest

from marserve.handlers.engines.optional import need


@pytest.fixture
def broken(tmp_path, monkeypatch):
    """An installed package whose module imports a missing one."""
    package = tmp_path / f"broken_{tmp_path.name}"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "part.py").write_text("import nowhere_at_all")
    monkeypatch.syspath_prepend(tmp_path)
    yield package.name
    for name in [item for item in sys.modules if item.startswith(package.name)]:
        del sys.modules[name]


def test_an_installed_module_is_imported():
    assert need("json.decoder", "json", "this test").__name__ == "json.decoder"


@pytest.mark.parametrize("module", ["nowhere", "nowhere.deeper"])
def test_the_message_has_the_pip_command(module):
    with pytest.raises(
        ImportError,
        match=r"^some_handler needs the package no-where, which is not installed: "
        r"pip install no-where$",
    ):
        need(module, "no-where", "some_handler")


def test_errors_inside_an_installed_package_are_raised(broken):
    with pytest.raises(ModuleNotFoundError, match="nowhere_at_all"):
        need(f"{broken}.part", broken, "some_handler")
    with pytest.raises(ModuleNotFoundError, match="nowhere_at_all"):
        need(f"{broken}.part", broken, "some_handler", "json")


def test_the_first_existing_module():
    assert need("json.moved", "json", "x", "json.decoder").__name__ == "json.decoder"


def test_no_existing_module():
    with pytest.raises(ImportError, match=r"x needs a release of json with json\.a or json\.b"):
        need("json.a", "json", "x", "json.b")
    with pytest.raises(ImportError, match="needs the package nowhere"):
        need("nowhere.a", "nowhere", "x", "nowhere.b")
