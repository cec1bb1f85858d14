"""Changes of a catalog that clients ask for."""

import pytest

from marserve.frontend.catalog.document import CatalogEntry, CatalogModel, WrongCatalog
from marserve.frontend.catalog.edits import (
    added,
    with_default,
    with_settings,
    with_workers,
    without,
)
from marserve.frontend.errors import (
    DefaultVersionInUse,
    ModelNotFound,
    VersionConflict,
    VersionNotFound,
)

ENTRY = CatalogEntry("m.mar", workers=(1, 1), settings={"size": 2})
TWO = {"m": CatalogModel("1", {"1": ENTRY, "2": ENTRY})}
ONE = {"m": CatalogModel("1", {"1": ENTRY})}


def test_a_version_is_added_and_the_first_is_the_default() -> None:
    assert added("m", "1", ENTRY)({}) == ONE
    assert added("m", "2", ENTRY)(ONE) == TWO
    with pytest.raises(VersionConflict):
        added("m", "2", ENTRY)(TWO)


def test_the_default_version_is_the_last_to_go() -> None:
    assert without("m", "2")(TWO) == ONE
    assert without("m", None)(ONE) == {}
    for version in ("1", None):
        with pytest.raises(DefaultVersionInUse):
            without("m", version)(TWO)


def test_a_version_is_changed() -> None:
    scaled = with_workers("m", None, 2, 3)(TWO)["m"].versions
    assert (scaled["1"].workers, scaled["2"].workers) == ((2, 3), (1, 1))
    changed = with_settings("m", "2", {"size": 4, "delay": 0.1})(TWO)["m"].versions
    assert changed["2"].settings == {"size": 4, "is_automatic": False, "delay": 0.1}
    assert with_default("m", "2")(TWO)["m"].default == "2"


def test_a_hint_replaces_earlier_hints_and_what_it_sets() -> None:
    catalog = ONE
    for changes, settings in (
        ({"delay": 0.2}, {"delay": 0.2, "size": 2, "is_automatic": False}),
        (
            {"performance_hint": "latency"},
            {"performance_hint": "latency", "size": 2, "is_automatic": False},
        ),
        ({"performance_hint": "throughput"}, {"performance_hint": "throughput"}),
        ({"delay": 0.0}, {"performance_hint": "throughput", "delay": 0.0}),
        ({"batchable": True}, {"batchable": True, "delay": 0.0}),
    ):
        catalog = with_settings("m", None, changes)(catalog)
        assert catalog["m"].versions["1"].settings == settings


@pytest.mark.parametrize(
    "edit", [without("x", None), with_default("x", "1"), with_workers("x", None, 1, 1)]
)
def test_what_is_not_there_cannot_be_changed(edit) -> None:
    with pytest.raises(ModelNotFound):
        edit(TWO)


@pytest.mark.parametrize("edit", [without("m", "9"), with_default("m", "9")])
def test_a_version_that_is_not_there_cannot_be_changed(edit) -> None:
    with pytest.raises(VersionNotFound):
        edit(TWO)


@pytest.mark.parametrize(
    "edit", [added("m", "3", ENTRY), without("m", None), with_default("m", "1")]
)
def test_a_model_that_cannot_be_read_cannot_be_changed(edit) -> None:
    with pytest.raises(WrongCatalog, match="m 1: why"):
        edit({"m": CatalogModel("", {}, wrong="m 1: why", text={})})
