"""Looks at every source of a setup, each with the checks of its kind."""

import errno
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from marserve.frontend.configuration.model_schema import BY_SPELLING
from marserve.tools.doctor.checks.archives import check_archive
from marserve.tools.doctor.checks.containers import check_containers
from marserve.tools.doctor.checks.handlers import PythonFile, check_imports, no_python
from marserve.tools.doctor.checks.images import (
    check_dockerfile,
    check_images,
    check_requirements,
    check_script,
)
from marserve.tools.doctor.checks.logs import check_log4j, check_metrics
from marserve.tools.doctor.checks.model_yaml import check_model_yaml, check_workflow
from marserve.tools.doctor.checks.properties import check_properties
from marserve.tools.doctor.commands import check_command
from marserve.tools.doctor.documents import documents_of, files_in
from marserve.tools.doctor.findings import Finding, Level, Place, Report
from marserve.tools.doctor.rules import finding
from marserve.tools.doctor.sources import Kind, Source, find_sources
from marserve.tools.doctor.surroundings import Surroundings, read_surroundings

_METRICS = ("ts_metrics", "model_metrics")


def examine(sources: list[Source], around: Surroundings) -> Report:
    """All findings about sources, and about what they say of each other."""
    with _unpacked_files(sources) as unpacked:
        return _examine(unpacked, around)


def _examine(sources: list[Source], around: Surroundings) -> Report:
    read_surroundings(around, sources)
    report = Report(read=[source.name for source in sources])
    for source in sources:
        try:
            if source.kind is Kind.UNREADABLE:
                raise PermissionError(errno.EACCES, "permission denied")
            found = _of_source(source, around)
            # What is no file of its own cannot be written.
            report.findings += (
                [replace(each, fixes=()) for each in found] if source.holder else found
            )
        except OSError as error:
            why = error.strerror or str(error)
            place = Place(source.name)
            report.findings.append(
                finding("not-read", place, f"{source.name} cannot be read: {why}.")
            )
    for fact in around.commands:
        report.findings += check_command(fact.value)
    report.findings += _together(around, is_moving=bool(report.at(Level.CHANGE)))
    report.findings = list(dict.fromkeys(report.findings))
    return report


def _of_source(source: Source, around: Surroundings) -> Iterator[Finding]:
    match source.kind:
        case Kind.PROPERTIES:
            yield from check_properties(source, around)
        case Kind.LOG4J:
            yield from check_log4j(source)
        case Kind.ARCHIVE:
            yield from check_archive(source, around)
        case Kind.DOCKERFILE:
            yield from check_images(source, around)
            yield from check_dockerfile(source, around)
        case Kind.SHELL:
            yield from check_images(source, around)
            yield from check_script(source, around)
        case Kind.REQUIREMENTS:
            yield from check_requirements(source)
        case Kind.PYTHON:
            yield from _python(source)
        case Kind.PLUGIN:
            yield finding(
                "java-plugins",
                Place(source.name),
                "A plugin of TorchServe's: Java plugins cannot be loaded.",
                "Serve what it offers beside marserve, or ask for it.",
            )
        case Kind.YAML:
            yield from check_images(source, around)
            yield from _yaml(source, around)


def _python(source: Source) -> Iterator[Finding]:
    try:
        file = PythonFile(source.name, source.text)
    except SyntaxError as error:
        yield no_python(source.name, error)
        return
    yield from check_imports(file)
    yield finding("unchanged", Place(source.name), f"the imports of {source.name}")


def _yaml(source: Source, around: Surroundings) -> Iterator[Finding]:
    documents = [*documents_of(source.text)]
    for document in documents:
        if _is_model_yaml(source, document):
            name = source.path.parent.name
            yield from check_model_yaml(Place(source.name), name, source.text)
        elif isinstance(document, dict) and set(_METRICS) & document.keys():
            yield from check_metrics(source)
        elif isinstance(document, dict) and {"models", "dag"} <= document.keys():
            yield from check_workflow(Place(source.name), source.text)
        else:
            yield from check_containers(source, document, around)
    if not documents and source.name.rpartition("/")[2].startswith(
        ("model-config", "model_config")
    ):
        yield from check_model_yaml(Place(source.name), "", source.text)


def _is_model_yaml(source: Source, document: Any) -> bool:
    if not isinstance(document, dict) or {"apiVersion", "services"} & document.keys():
        return False
    named = source.path.name.startswith(("model-config", "model_config"))
    return named or len({str(key) for key in document} & BY_SPELLING.keys()) > 1


@contextmanager
def _unpacked_files(sources: Sequence[Source]) -> Iterator[list[Source]]:
    """The sources, and the configuration files that ConfigMaps among them hold, in a directory."""
    with TemporaryDirectory(prefix="marserve-doctor-") as folder:
        found = [*sources]
        for number, source in enumerate(each for each in sources if each.kind is Kind.YAML):
            with suppress(OSError):
                pages = documents_of(source.text) if "ConfigMap" in source.text else ()
                files = (file for page in pages for file in files_in(page))
                for name, text in files:
                    if name.endswith(".properties") and "/" not in name:
                        path = Path(folder, str(number), name)
                        path.parent.mkdir(exist_ok=True)
                        path.write_text(text, encoding="utf-8")
                        found += [
                            replace(each, name=f"{source.name}/{name}", holder=source.path)
                            for each in find_sources(path)
                        ]
        yield found


def _together(around: Surroundings, *, is_moving: bool) -> Iterator[Finding]:
    """What only several sources tell; ``is_moving``: that they are TorchServe's still."""
    served = next((fact.value for fact in around.commands if fact.value.in_container), None)
    if is_moving and served is not None and "--log-config" not in served.arguments:
        yield finding(
            "console-log",
            served.place,
            "What a container prints has neither the access log nor the metrics.",
            "They are in logs/access_log.log and logs/ts_metrics.log, or where --log-config says.",
        )
    installed = {fact.value for fact in around.packages}
    theirs = {"torchserve", "torchserve-nightly"} & installed
    if theirs and "marserve" in installed:
        yield finding(
            "two-servers",
            Place("."),
            f"{' and '.join(sorted(theirs))} and marserve are installed by the same setup; where "
            "it is the same environment, files of one replace files of the other.",
            "Install one of them.",
        )
