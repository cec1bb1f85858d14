"""YAML files of Kubernetes, Helm and compose: their documents, and the containers in them.

Helm templates are not YAML before they are rendered: expressions in braces are replaced by a word,
and lines with control structures are removed. Documents that still cannot be parsed are skipped.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from marserve.frontend.configuration.bounded_yaml import load_yaml

_CONTROL = re.compile(
    r"(?m)^[ \t]*\{\{-?\s*(?:if|else|end|range|with|define|include|template|/\*|\$)"
    r"[^\n]*\}\}[ \t]*$"
)
_TEMPLATE = re.compile(r"\{\{(?:(?!\{\{).)*?\}\}")  # stops at the next one, for linear time
_PROBES = ("readinessProbe", "livenessProbe", "startupProbe", "healthcheck")


@dataclass(frozen=True)
class Container:
    """A container of a pod, or a service of compose."""

    name: str
    image: str
    words: tuple[object, ...] = ()  # entrypoint, command and arguments, if given
    environment: Mapping[str, str] = field(default_factory=dict)
    ports: tuple[int, ...] = ()
    probes: Mapping[str, Any] = field(default_factory=dict)
    is_service: bool = False  # of compose


def documents_of(text: str) -> Iterator[Any]:
    """Return the documents of a file that are YAML after the replacement of templates."""
    plain = _TEMPLATE.sub("templated", _CONTROL.sub("", text)) if "{{" in text else text
    for page in re.split(r"(?m)^---(?:[ \t].*)?$", plain):
        try:
            document = load_yaml(page)
        except Exception:  # noqa: BLE001, S112 - the parser raises many types of errors
            continue
        if document is not None:
            yield document


def containers_in(document: Any) -> Iterator[Container]:
    """Return all containers at any depth of a document."""
    if isinstance(document, dict):
        services = document.get("services")
        if isinstance(services, dict) and "apiVersion" not in document:
            for name, service in services.items():
                if isinstance(service, dict):
                    yield container_of({**service, "name": str(name)}, is_service=True)
        for key, value in document.items():
            if key in ("containers", "initContainers") and isinstance(value, list):
                yield from (container_of(each) for each in value if isinstance(each, dict))
            else:
                yield from containers_in(value)
    elif isinstance(document, list):
        for each in document:
            yield from containers_in(each)


def files_in(document: Any) -> Iterator[tuple[str, str]]:
    """Return names and texts of the files in a ConfigMap."""
    if isinstance(document, dict) and document.get("kind") == "ConfigMap":
        data = document.get("data")
        for name, text in data.items() if isinstance(data, dict) else ():
            if isinstance(text, str):
                yield str(name), text


def container_of(of: Mapping[str, Any], *, is_service: bool = False) -> Container:
    """Return the container of a mapping, or of a compose service with ``is_service``."""
    words = [*_words(of.get("entrypoint")), *_words(of.get("command")), *_words(of.get("args"))]
    return Container(
        str(of.get("name", "")),
        str(of.get("image", "")),
        tuple(words),
        _environment(of.get("environment" if is_service else "env")),
        tuple(_ports(of.get("ports"))),
        {name: of[name] for name in _PROBES if of.get(name)},
        is_service,
    )


def _words(value: Any) -> list[object]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _environment(value: Any) -> dict[str, str]:
    found: dict[str, str] = {}
    if isinstance(value, dict):
        return {str(name): str(text) for name, text in value.items()}
    for each in value if isinstance(value, list) else ():
        if isinstance(each, dict) and "name" in each:
            found[str(each["name"])] = str(each.get("value", ""))
        elif isinstance(each, str):
            name, _, text = each.partition("=")
            found[name] = text
    return found


def _ports(value: Any) -> Iterator[int]:
    for each in value if isinstance(value, list) else ():
        text = str(each.get("containerPort", "")) if isinstance(each, dict) else str(each)
        if match := re.search(r"(\d+)(?:/\w+)?$", text):
            yield int(match[1])
