"""The lines of engines' metrics that reach the page."""

import pytest
from steps import result_of

from marserve.frontend.serving.engine_metrics import EnginePage, engine_lines


def lines_of(*texts: str, only: tuple[str, ...] = ()) -> list[str]:
    pages = [EnginePage(f'registered_model="{place}"', text) for place, text in enumerate(texts)]
    return result_of(engine_lines(pages, only))


def test_samples_get_labels_and_the_rest_is_left_out():
    found = lines_of('# HELP a:b\na:b{x="1"} 1.5 7\nplain 2\n\na:c 3', "a:b NaN\n")
    assert found == [
        'a:b{registered_model="0",x="1"} 1.5\n',
        'a:c{registered_model="0"} 3\n',
        'a:b{registered_model="1"} NaN\n',
    ]
    assert lines_of("a:b 1\na:c 2", only=("a:c",)) == ['a:c{registered_model="0"} 2\n']


@pytest.mark.parametrize(
    "text", ["\n" * 1000, "a:b 1\n" * 1000, 'a:b{x="' + "y" * 10**6 + '"} 1\na:c 2'], ids=len
)
def test_any_page_is_read_in_small_steps(text):
    steps = []
    found = result_of(engine_lines([EnginePage("", text)]), steps.append)
    assert len(steps) == 1 + len(text.splitlines())
    assert steps[0] == len(text)
    assert sum(steps[1:]) == sum(map(len, found))
