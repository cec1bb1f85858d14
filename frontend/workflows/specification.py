"""Reads the YAML of a workflow: its nodes, their settings, and the edges between them.

    models:
      batch-size: 4                  a default of the models that follow
      m1: {url: m1.mar}              every other key is a model
    dag:
      pre: [m1]                      "pre" is not in models: a function of the handler file
      m1: []

As in TorchServe, the order counts: a default applies only to the models behind it, and functions
have the last retries and time limit. The errors of the graph have TorchServe's texts.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter
from typing import Any

from marserve.frontend.configuration.model_schema import MAX_WORKERS
from marserve.frontend.configuration.setting import rows_of, setting
from marserve.frontend.configuration.setting_kinds import short_repr, whole
from marserve.frontend.configuration.unread_keys import nearest
from marserve.frontend.errors import GraphRefused, WorkflowRefused

#: The maximum number of nodes of a workflow: each is one process or several.
MAX_NODES = 100
_MAX_TOLD = 20  # unknown keys
_MAX_KEY = 40  # characters


@dataclass(frozen=True)
class NodeSettings:
    """The settings of a node, with TorchServe's defaults; times in milliseconds."""

    min_workers: int = setting("min-workers", whole(0, MAX_WORKERS), 1, "")
    max_workers: int = setting("max-workers", whole(1, MAX_WORKERS), 1, "")
    batch_size: int = setting("batch-size", whole(1), 1, "")
    max_batch_delay_ms: int = setting("max-batch-delay", whole(0), 50, "")
    retry_attempts: int = setting("retry-attempts", whole(0, 100), 1, "")
    timeout_ms: int = setting("timeout-ms", whole(1), 10_000, "")


_KEYS = {row.key: row for row in rows_of(NodeSettings)}


@dataclass(frozen=True)
class Node:
    """A node; its parents and children are in the order of the specification."""

    name: str
    url: str  # of the model's archive; empty for a function of the handler file
    settings: NodeSettings
    parents: tuple[str, ...]
    children: tuple[str, ...]

    @property
    def is_function(self) -> bool:
        """Whether it is a function of the handler file."""
        return not self.url

    @property
    def timeout(self) -> float:
        """The time limit of one attempt, in seconds."""
        return self.settings.timeout_ms / 1000

    @property
    def tries(self) -> int:
        """The maximum number of attempts."""
        return self.settings.retry_attempts + 1


@dataclass(frozen=True)
class Specification:
    """The graph of a workflow."""

    defaults: NodeSettings  # at the end of ``models``
    nodes: Mapping[str, Node]  # by name; parents come before their children
    dag: Mapping[str, Sequence[str]]  # the edges as in the YAML
    warnings: tuple[str, ...] = ()  # about keys that are not read

    @property
    def start(self) -> Node:
        """The node that gets the request."""
        return next(iter(self.nodes.values()))

    @property
    def leaves(self) -> Sequence[str]:
        """The nodes whose outputs are the answer."""
        return [name for name, node in self.nodes.items() if not node.children]

    @property
    def longest(self) -> float:
        """The maximum seconds of a run: all attempts of the nodes on the longest path."""
        until: dict[str, float] = {}
        for name, node in self.nodes.items():
            before = max((until[parent] for parent in node.parents), default=0.0)
            until[name] = before + node.timeout * node.tries
        return max(until.values())

    @property
    def dag_text(self) -> str:
        """The edges as TorchServe describes them: ``{pre=[m1, m2], m1=[post]}``."""
        edges = (f"{name}=[{', '.join(children)}]" for name, children in self.dag.items())
        return f"{{{', '.join(edges)}}}"


def read_specification(document: Any) -> Specification:
    """Return the specification of a parsed YAML file; raises WorkflowRefused or GraphRefused."""
    if not isinstance(document, dict):
        raise WorkflowRefused("The specification is not a mapping with models and dag.")
    defaults, models = _read_models(document.get("models"))
    dag = _read_dag(document.get("dag"))
    names = dict.fromkeys(each for name, children in dag.items() for each in (name, *children))
    if len(names) > MAX_NODES:
        raise WorkflowRefused(f"The workflow has more than {MAX_NODES} nodes.")
    parents = _parents(names, dag)
    function = NodeSettings(
        batch_size=1,
        max_batch_delay_ms=0,
        retry_attempts=defaults.retry_attempts,
        timeout_ms=defaults.timeout_ms,
    )
    nodes = {}
    for name in _sorted(parents, dag):
        url, settings = models.get(name, ("", function))
        nodes[name] = Node(name, url, settings, tuple(parents[name]), tuple(dag.get(name, ())))
    return Specification(defaults, nodes, dag, tuple(_unread(document)))


def _unread(document: Mapping[Any, Any]) -> Iterator[str]:
    """Yield a sentence for each unknown key, of the first ones."""
    places = {"the specification": (document, ["models", "dag"])}
    for name, value in document["models"].items():
        if name not in _KEYS:
            places[f"models.{name}"] = value, ["url", *_KEYS]
    unknown = (
        (place, key, known)
        for place, (section, known) in places.items()
        for key in section
        if key not in known
    )
    for place, key, known in itertools.islice(unknown, _MAX_TOLD):
        meant = nearest(key, known) if isinstance(key, str) and len(key) <= _MAX_KEY else ""
        advice = f"did you mean {meant}?" if meant else f"its keys are {', '.join(known)}."
        yield f"{_shown(place)} has no {_shown(str(key)[:_MAX_KEY])}; {advice}"


def _read_models(section: Any) -> tuple[NodeSettings, dict[str, tuple[str, NodeSettings]]]:
    """Return the last defaults, and the URL and settings of each model."""
    if not isinstance(section, dict):
        raise WorkflowRefused("The specification has no mapping called models.")
    defaults, models = NodeSettings(), {}
    for name, value in section.items():
        if name in _KEYS:
            defaults = _with(defaults, {name: value}, "models")
            continue
        where = f"models.{name}"
        if not isinstance(value, dict):
            raise WorkflowRefused(f"{_shown(where)} is not a mapping with the url of a model.")
        url = value.get("url")
        if not isinstance(url, str) or not url:
            raise WorkflowRefused(f"{_shown(where)} has no url.")
        models[name] = url, _with(defaults, value, where)
    return defaults, models


def _with(settings: NodeSettings, values: Mapping[str, Any], where: str) -> NodeSettings:
    changes: dict[str, Any] = {}
    for key, row in _KEYS.items():
        if key in values and not row.kind.accepts(values[key]):
            text = f"{key}={short_repr(values[key])}: it is {row.kind.rule}."
            raise WorkflowRefused(f"{_shown(where)}: {text}")
        changes |= row.read(values[key]) if key in values else {}
    return replace(settings, **changes)


def _read_dag(section: Any) -> dict[str, tuple[str, ...]]:
    if not isinstance(section, dict):
        raise WorkflowRefused("The specification has no mapping called dag.")
    dag: dict[str, tuple[str, ...]] = {}
    for name, children in section.items():
        found = [] if children is None else children
        if not isinstance(found, list) or any(each and not isinstance(each, str) for each in found):
            raise WorkflowRefused(f"{_shown(f'dag.{name}')} is not a list of names.")
        dag[name] = tuple(each for each in found if each and each.strip())
    for each in {*dag, *itertools.chain.from_iterable(dag.values())}:
        if not each.strip() or not each.isprintable() or "/" in each:
            raise WorkflowRefused(f"{_shown(each)} cannot be the name of a node.")
    return dag


def _parents(names: Iterable[str], dag: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    parents: dict[str, list[str]] = {name: [] for name in names}
    for name, children in dag.items():
        for child in children:
            if child == name:
                raise GraphRefused("Self loop exception")
            parents[child].append(name)
        if len(set(children)) < len(children):  # the same edge twice
            raise GraphRefused("loop exception")
    return parents


def _sorted(parents: Mapping[str, list[str]], dag: Mapping[str, Sequence[str]]) -> Sequence[str]:
    """Return the nodes, parents before their children."""
    if [*parents.values()].count([]) != 1:
        raise GraphRefused("DAG should have only one start node")
    sorter: TopologicalSorter[str] = TopologicalSorter()
    for name, children in dag.items():
        sorter.add(name)
        for child in children:
            sorter.add(child, name)
    try:
        return [*sorter.static_order()]
    except CycleError as error:
        raise GraphRefused("Not a valid DAG") from error


def _shown(text: str) -> str:
    return text if text.isprintable() and len(text) <= 80 else short_repr(text)
