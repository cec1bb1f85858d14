"""Each parser gets its corpus, and a few hundred changed inputs of it: the same ones every time.

`make fuzz` goes on from here for as long as one likes.
"""

import logging
from collections.abc import Iterator

import pytest
from fuzz import catalog
from fuzz.limits import measure
from fuzz.mutations import inputs
from hypothesis import HealthCheck, Phase, given, settings

# The server ignores aiohttp's warnings of bad headers; pytest undoes that.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """What is said about garbage is nobody's concern here."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize(
    ("name", "file"), [(name, file) for name in catalog.NAMES for file in catalog.seeds(name)]
)
def test_an_input_of_the_corpus(name: str, file: str) -> None:
    module = catalog.load(name)
    measure(module.target, catalog.seeds(name)[file], module.LIMITS)


@pytest.mark.fuzz
@pytest.mark.parametrize("name", catalog.NAMES)
def test_changed_inputs(name: str) -> None:
    module = catalog.load(name)

    @settings(
        max_examples=getattr(module, "EXAMPLES", 150),
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(inputs(name))
    def check(data: bytes) -> None:
        measure(module.target, data, module.LIMITS, with_memory=False)

    check()
