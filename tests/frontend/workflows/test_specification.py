"""What a specification says, and what is wrong with it."""

import contextlib
import string

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from marserve.frontend.errors import GraphRefused, WorkflowRefused
from marserve.frontend.workflows.specification import (
    MAX_NODES,
    NodeSettings,
    Specification,
    read_specification,
)


def read(text: str) -> Specification:
    return read_specification(yaml.safe_load(text))


FORK = """
models:
  m1: {url: m1.mar}
  m2: {url: m2.mar}
dag:
  pre: [m1, m2]
  m1: [post]
  m2: [post]
"""


def test_the_defaults_are_torchserves():
    settings = read("{models: {m: {url: m.mar}}, dag: {m: []}}").start.settings
    assert settings == NodeSettings(
        min_workers=1,
        max_workers=1,
        batch_size=1,
        max_batch_delay_ms=50,
        retry_attempts=1,
        timeout_ms=10_000,
    )


def test_a_name_that_is_no_model_is_a_function():
    nodes = read(FORK).nodes
    assert [name for name, node in nodes.items() if node.is_function] == ["pre", "post"]
    assert nodes["m1"].url == "m1.mar"


def test_parents_come_before_their_children_in_the_order_of_the_file():
    specification = read(FORK)
    assert list(specification.nodes) == ["pre", "m1", "m2", "post"]
    assert specification.nodes["post"].parents == ("m1", "m2")
    assert specification.start.name == "pre"
    assert specification.leaves == ["post"]


@pytest.mark.parametrize(
    ("text", "warning"),
    [
        (
            "{models: {a: {url: a.mar, batchSize: 4}}, dag: {a: []}}",
            "models.a has no batchSize; did you mean batch-size?",
        ),
        (
            "{models: {a: {url: a.mar, 7: 4}}, dag: {a: []}}",
            "models.a has no 7; its keys are url, min-workers, max-workers, batch-size, "
            "max-batch-delay, retry-attempts, timeout-ms.",
        ),
        (
            "{models: {a: {url: a.mar}}, dag: {a: []}, dags: {}}",
            "the specification has no dags; did you mean dag?",
        ),
    ],
)
def test_an_unknown_key_was_ignored_in_silence(text, warning):
    assert read(text).warnings == (warning,)


def test_a_default_counts_for_the_models_behind_it():
    nodes = read(
        "{models: {a: {url: a.mar}, batch-size: 8, b: {url: b.mar},"
        " c: {url: c.mar, batch-size: 2}}, dag: {a: [b, c]}}"
    ).nodes
    assert [node.settings.batch_size for node in nodes.values()] == [1, 8, 2]


def test_functions_have_one_worker_no_batches_and_the_last_defaults_of_time_and_tries():
    text = (
        "{models: {max-workers: 4, batch-size: 8, max-batch-delay: 90, retry-attempts: 3,"
        " timeout-ms: 500}, dag: {f: []}}"
    )
    assert read(text).start.settings == NodeSettings(
        batch_size=1, max_batch_delay_ms=0, retry_attempts=3, timeout_ms=500
    )
    assert read(text).defaults.batch_size == 8


def test_the_longest_path_is_what_all_tries_of_its_nodes_may_take():
    specification = read(
        "{models: {timeout-ms: 1000, retry-attempts: 0, a: {url: a}, "
        "b: {url: b, timeout-ms: 5000, retry-attempts: 2}}, dag: {a: [b, c], b: [d], c: [d]}}"
    )
    assert specification.longest == 1 + 15 + 1


def test_edges_are_described_as_java_writes_a_map():
    assert read(FORK).dag_text == "{pre=[m1, m2], m1=[post], m2=[post]}"


@pytest.mark.parametrize("children", ["", "[]", "[null]", "['']", "[' ']"])
def test_a_node_without_children(children):
    assert read(f"models: {{}}\ndag:\n  f: {children}").leaves == ["f"]


@pytest.mark.parametrize(
    ("dag", "message"),
    [
        ("{}", "DAG should have only one start node"),
        ("{a: [c], b: [c]}", "DAG should have only one start node"),
        ("{a: [b], b: [a]}", "DAG should have only one start node"),
        ("{a: [a]}", "Self loop exception"),
        ("{a: [b, b]}", "loop exception"),
        ("{s: [a], a: [b], b: [a]}", "Not a valid DAG"),
        ("{s: [a], a: [b], b: [c], c: [a]}", "Not a valid DAG"),
    ],
)
def test_what_is_no_graph_is_refused_in_torchserves_words(dag, message):
    with pytest.raises(GraphRefused) as refusal:
        read(f"models: {{}}\ndag: {dag}")
    assert refusal.value.message == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not a mapping with models and dag"),
        ("[1]", "is not a mapping with models and dag"),
        ("dag: {a: []}", "no mapping called models"),
        ("models: [a]", "no mapping called models"),
        ("models: {}", "no mapping called dag"),
        ("{models: {}, dag: [a]}", "no mapping called dag"),
        ("{models: {}, dag: {a: b}}", "dag.a is not a list of names"),
        ("{models: {}, dag: {a: [1]}}", "dag.a is not a list of names"),
        ("{models: {}, dag: {a: [[b]]}}", "dag.a is not a list of names"),
        ("{models: {}, dag: {a: [b/c]}}", "b/c cannot be the name of a node"),
        ("{models: {}, dag: {'': [b]}}", "cannot be the name of a node"),
        ('{models: {}, dag: {a: ["b\\n"]}}', "cannot be the name of a node"),
        ("{models: {m: m.mar}, dag: {}}", "models.m is not a mapping with the url"),
        ("{models: {m: {}}, dag: {}}", "models.m has no url"),
        ("{models: {m: {url: 1}}, dag: {}}", "models.m has no url"),
        ("{models: {batch-size: x}, dag: {}}", "batch-size='x': it is a whole number, 1 or more"),
        ("{models: {batch-size: 0}, dag: {}}", "batch-size=0: it is a whole number, 1 or more"),
        ("{models: {batch-size: true}, dag: {}}", "batch-size=True: it is"),
        ("{models: {batch-size: 1.5}, dag: {}}", "batch-size=1.5: it is"),
        ("{models: {max-workers: 1001}, dag: {}}", "from 1 to 1000"),
        ("{models: {retry-attempts: -1}, dag: {}}", "from 0 to 100"),
        ("{models: {timeout-ms: 0}, dag: {}}", "timeout-ms=0: it is a whole number, 1 or more"),
        ("{models: {m: {url: a, timeout-ms: 0}}, dag: {}}", "models.m: timeout-ms=0"),
    ],
)
def test_what_is_no_specification_is_refused_with_the_place_and_the_rule(text, message):
    with pytest.raises(WorkflowRefused) as refusal:
        read(text)
    assert message in refusal.value.message


@pytest.mark.parametrize("count", [MAX_NODES + 1, 10_000])
def test_a_workflow_has_so_many_nodes_at_most(count):
    children = [f"n{number}" for number in range(count - 1)]
    with pytest.raises(WorkflowRefused, match=f"more than {MAX_NODES} nodes"):
        read_specification({"models": {}, "dag": {"a": children}})


names = st.text(alphabet=string.ascii_lowercase[:6], min_size=1, max_size=1)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(["models", "dag", "x"]), values) | values)
def test_any_document_is_read_or_refused(document):
    with contextlib.suppress(WorkflowRefused, GraphRefused):
        read_specification(document)


@given(st.dictionaries(names, st.lists(names, max_size=4), max_size=6))
def test_any_graph_is_in_order_or_refused(dag):
    try:
        specification = read_specification({"models": {}, "dag": dag})
    except GraphRefused:
        return
    seen = set()
    for name, node in specification.nodes.items():
        assert set(node.parents) <= seen
        assert all(name in specification.nodes[child].parents for child in node.children)
        seen.add(name)
    assert seen == {*dag, *(child for children in dag.values() for child in children)}
