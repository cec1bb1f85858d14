from types import SimpleNamespace
from typing import Any

import pytest

from marserve.frontend.errors import (
    DefaultVersionInUse,
    ModelNotFound,
    ModelNotYetLoaded,
    VersionConflict,
    VersionNotFound,
)
from marserve.frontend.serving.registry import CatalogProgress, FailedLoad, ModelRegistry


def stand_in(name: str, version: str) -> Any:
    """The register looks at names and versions only."""
    return SimpleNamespace(name=name, version=version)


def test_the_first_version_is_the_default_until_another_is_chosen():
    registry = ModelRegistry()
    first, second = stand_in("m", "1"), stand_in("m", "2")
    registry.add(first)
    registry.add(second)
    assert registry.find("m") is first
    assert registry.find("m", "2") is second
    registry.set_default("m", "2")
    assert registry.find("m") is registry.default("m") is second
    assert registry.default("x") is None


def test_an_index_is_made_once_until_the_models_change():
    """A name of OpenAI's API that no model has was searched in all models for each request."""
    registry = ModelRegistry()
    made = []

    def count(models):
        made.append(len(list(models)))
        return [model.version for model in models.defaults()]

    first, second = stand_in("m", "1"), stand_in("m", "2")
    for change, expected in (
        (lambda: registry.add(first), ["1"]),
        (lambda: registry.add(second), ["1"]),
        (lambda: registry.set_default("m", "2"), ["2"]),
        (lambda: registry.replace(second, stand_in("m", "2")), ["2"]),
        (lambda: registry.remove(first), ["2"]),
    ):
        change()
        assert [registry.index(count) for _ in range(3)] == [expected] * 3
    assert made == [1, 2, 2, 2, 1]


def test_models_are_listed_by_name_and_versions_by_version():
    registry = ModelRegistry()
    models = {key: stand_in(*key) for key in [("b", "1"), ("a", "2"), ("a", "1"), ("a", "10")]}
    for model in models.values():
        registry.add(model)
    assert registry.defaults() == [models["a", "2"], models["b", "1"]]
    assert registry.versions("a") == [models["a", "1"], models["a", "10"], models["a", "2"]]
    assert len(list(registry)) == 4


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda r: r.find("x"), ModelNotFound, "Model not found: x"),
        (lambda r: r.find("x", "1"), ModelNotFound, "Model not found: x"),
        (lambda r: r.versions("x"), ModelNotFound, "Model not found: x"),
        (lambda r: r.find("m", "9"), VersionNotFound, "Model version: 9 does not exist for model"),
        (lambda r: r.find("m", ""), VersionNotFound, "Model version:  does not exist"),
        (lambda r: r.set_default("x", "1"), ModelNotFound, "Model not found: x"),
        (lambda r: r.set_default("m", "9"), VersionNotFound, "Model version 9 does not exist"),
        (lambda r: r.add(stand_in("m", "1")), VersionConflict, "version 1 is already registered"),
    ],
)
def test_what_is_not_there_or_there_already_is_refused(call, error, message):
    registry = ModelRegistry()
    registry.add(stand_in("m", "1"))
    with pytest.raises(error, match=message):
        call(registry)


def test_the_default_leaves_last():
    registry = ModelRegistry()
    default, other = stand_in("m", "1"), stand_in("m", "2")
    registry.add(default)
    registry.add(other)
    with pytest.raises(DefaultVersionInUse):
        registry.remove(default)
    registry.remove(other)
    registry.remove(default)
    registry.remove(default)
    assert list(registry) == []
    registry.add(other)
    assert registry.find("m") is other


def test_a_version_is_replaced_by_one_of_the_same_name_and_version():
    registry = ModelRegistry()
    old, new, late = (stand_in("m", "1") for _ in range(3))
    registry.add(old)
    registry.replace(old, new)
    assert list(registry) == [new] == registry.defaults()
    with pytest.raises(VersionNotFound):
        registry.replace(old, late)
    registry.remove(new)
    with pytest.raises(ModelNotFound):
        registry.replace(new, late)


def test_another_model_of_the_same_name_and_version_is_left_alone():
    registry = ModelRegistry()
    registry.add(stand_in("m", "1"))
    registry.remove(stand_in("m", "1"))
    assert len(list(registry)) == 1


def test_what_a_catalog_still_brings_is_not_missing_but_not_there_yet():
    registry = ModelRegistry()
    registry.add(stand_in("m", "1"))
    registry.catalog_progress = CatalogProgress(awaited=frozenset({"m", "n", "failed"}))
    registry.failed.append(FailedLoad("failed", "failed.mar", "no weights"))
    for name, version in (("n", None), ("m", "2")):
        with pytest.raises(ModelNotYetLoaded) as unavailable:
            registry.find(name, version)
        assert (unavailable.value.status, unavailable.value.retry_after) == (503, 1)
    for name in ("failed", "unknown"):
        with pytest.raises(ModelNotFound) as missing:
            registry.find(name)
        assert missing.value.status == 404
    registry.catalog_progress = CatalogProgress(is_known=False)
    with pytest.raises(ModelNotYetLoaded):
        registry.find("unknown")
