"""The plan leads from any state to the wanted one, and never leaves a model without a version."""

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from marserve.frontend.catalog.document import CatalogModel
from marserve.frontend.catalog.plan import (
    Reconfigure,
    Register,
    Replace,
    Scale,
    SetDefault,
    Step,
    Unregister,
    plan,
)
from marserve.frontend.configuration.model_entry import ModelEntry

SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "size": st.sampled_from([1, 4]),  # live
        "delay": st.sampled_from([0.0, 0.1]),  # live
        "response_timeout": st.sampled_from([5, 60]),  # not
    },
)
ENTRIES = st.builds(
    ModelEntry,
    url=st.sampled_from(["a.mar", "b.mar"]),
    handler=st.sampled_from(["", "own"]),
    workers=st.sampled_from([None, (0, 0), (1, 1), (2, 4)]),
    settings=SETTINGS,
)


@st.composite
def models(draw: st.DrawFn) -> CatalogModel:
    versions = draw(st.dictionaries(st.sampled_from("1234"), ENTRIES, min_size=1))
    return CatalogModel(draw(st.sampled_from(sorted(versions))), versions)


MAYBE = st.none() | models()


class Registry:
    """What is registered of one name, with the rules of the real registry."""

    def __init__(self, registered: CatalogModel | None) -> None:
        self.versions: dict[str, Any] = dict(registered.versions) if registered else {}
        self.default = registered.default if registered else ""

    @property
    def model(self) -> CatalogModel | None:
        return CatalogModel(self.default, dict(self.versions)) if self.versions else None

    def take(self, step: Step) -> None:
        match step:
            case Register(version, entry):
                assert version not in self.versions
                self.default = self.default if self.versions else version
                self.versions[version] = entry
            case Replace(version, entry):
                assert version in self.versions
                self.versions[version] = entry
            case Reconfigure(version, entry):
                before = self.versions[version]
                assert entry == replace(before, settings=entry.settings)
                timeouts = [each.settings.get("response_timeout") for each in (before, entry)]
                assert timeouts[0] == timeouts[1]
                self.versions[version] = entry
            case Scale(version, entry):
                assert entry.workers != self.versions[version].workers
                assert entry == replace(self.versions[version], workers=entry.workers)
                self.versions[version] = entry
            case SetDefault(version):
                assert version in self.versions
                self.default = version
            case Unregister(version):
                assert version != self.default or len(self.versions) == 1
                del self.versions[version]


@given(wanted=MAYBE, registered=MAYBE)
def test_a_plan_leads_to_what_is_wanted(wanted, registered):
    registry = Registry(registered)
    for step in plan(wanted, registered):
        registry.take(step)
        assert bool(registry.versions) or wanted is None
        assert registry.default in registry.versions or not registry.versions
    assert registry.model == wanted
    assert plan(wanted, registry.model) == []


@given(wanted=models(), registered=models())
def test_the_default_moves_to_what_is_there_and_stays_until_then(wanted, registered):
    steps = plan(wanted, registered)
    kinds = [type(step) for step in steps]
    if SetDefault in kinds:
        at = kinds.index(SetDefault)
        assert {Register, Replace, Scale, Reconfigure}.isdisjoint(kinds[at + 1 :])
        assert Unregister not in kinds[:at]


def test_a_version_is_changed_in_place_where_that_can_be():
    old = ModelEntry("a.mar", workers=(1, 1), settings={"size": 1})

    def steps_to(new):
        there = CatalogModel("1", {"1": old})
        return [type(step).__name__ for step in plan(CatalogModel("1", {"1": new}), there)]

    assert steps_to(old) == []
    assert steps_to(replace(old, workers=(2, 2))) == ["Scale"]
    assert steps_to(replace(old, settings={"size": 4, "delay": 0.2})) == ["Reconfigure"]
    assert steps_to(replace(old, settings={"size": 4}, workers=(2, 2))) == ["Reconfigure", "Scale"]
    assert steps_to(replace(old, settings={"is_automatic": True})) == ["Reconfigure"]
    assert steps_to(replace(old, settings={})) == ["Reconfigure"]
    # A setting that is not live needs a new load.
    assert steps_to(replace(old, url="b.mar")) == ["Replace"]
    assert steps_to(replace(old, settings={"size": 1, "response_timeout": 5})) == ["Replace"]
    assert steps_to(replace(old, workers=None)) == ["Replace"]
