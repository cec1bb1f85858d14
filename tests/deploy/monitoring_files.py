"""What stands in deploy/: expressions of dashboards and rules, and the metrics they name."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
MONITORING = DEPLOY / "monitoring"
DASHBOARDS = sorted((MONITORING / "grafana" / "dashboards").glob("*.json"))
RULES = MONITORING / "prometheus" / "marserve.rules.yml"

_LABEL_LISTS = re.compile(r"\b(by|on|without|ignoring|group_left|group_right)\s*\([^)]*\)")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_NAME = re.compile(r"(?<![\w.$:])([A-Za-z_:][\w:]*)(?!\s*\(|[\w:])")
_WORDS = {"and", "or", "unless", "bool", "offset", "group_left", "group_right"}


def panels(board: Path) -> list[dict[str, Any]]:
    """The panels of a dashboard, rows left out."""
    every: list[dict[str, Any]] = json.loads(board.read_text())["panels"]
    return [panel for panel in every if panel["type"] != "row"]


def expressions(board: Path) -> Iterator[str]:
    """What a dashboard asks Prometheus."""
    for panel in panels(board):
        yield from (target["expr"] for target in panel["targets"])


def rules() -> list[dict[str, str]]:
    """What is recorded, and the alerts."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def metric_names(expression: str) -> set[str]:
    """The metrics that an expression is about."""
    text = _QUOTED.sub('""', expression)
    for surplus in (re.compile(r"\{[^}]*\}"), re.compile(r"\[[^]]*\]"), _LABEL_LISTS):
        text = surplus.sub(" ", text)
    return set(_NAME.findall(text)) - _WORDS
