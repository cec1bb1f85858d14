"""Apply the checks of its kind to every source of a setup."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from marserve.frontend.configuration.model_schema import BY_SPELLING
from marserve.tools.doctor.checks.archives import check_archive
from marserve.tools.doctor.checks.containers import check_containers
from marserve.tools.doctor.checks.handlers import parse_files
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
from marserve.tools.doctor.sources import Kind, Source, embedded_source
from marserve.tools.doctor.surroundings import Surroundings, read_facts

_METRICS = ("ts_metrics", "model_metrics")


def examine(sources: Sequence[Source], around: Surroundings) -> Report:
    """Return all findings about sources and their combination."""
    report = Report()
    sources = [*sources]
    for source in [each for each in sources if each.kind is Kind.YAML]:
        with _reported(report, source):
            sources += _embedded(source)
    for source in sources:
        with _reported(report, source):
            read_facts(around, source)
    for source in sources:
        report.read.append(source.name)
        with _reported(report, source):
            for each in _of_source(source, around):
                # A file embedded in another one cannot be written.
                report.findings.append(replace(each, fixes=()) if source.holder else each)
    for fact in around.commands:
        report.findings += check_command(fact.value)
    report.findings += _check_combined(around, is_moving=bool(report.at(Level.CHANGE)))
    report.findings = list(dict.fromkeys(report.findings))
    return report


@contextmanager
def _reported(report: Report, source: Source) -> Iterator[None]:
    """Turn errors of reading or parsing a source into a finding."""
    try:
        yield
    except (OSError, ValueError, RecursionError) as error:
        why = " ".join(((isinstance(error, OSError) and error.strerror) or str(error)).split())
        if isinstance(error, RecursionError):
            why = "it is nested too deeply"
        what = f"{source.name} cannot be read: {why[:1].lower()}{why[1:]}."
        report.findings.append(finding("not-read", Place(source.name), what))


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
                "This is a plugin of TorchServe: Java plugins cannot be loaded.",
                "Serve its functions beside marserve, or ask for them.",
            )
        case Kind.YAML:
            yield from check_images(source, around)
            yield from _yaml(source, around)


def _python(source: Source) -> Iterator[Finding]:
    parsed, found = parse_files("", {source.name: source.text})
    yield from found
    if parsed:
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


def _embedded(source: Source) -> Iterator[Source]:
    for page in documents_of(source.text) if "ConfigMap" in source.text else ():
        for name, text in files_in(page):
            is_config = name.endswith(".properties") and "/" not in name
            if is_config and (found := embedded_source(source, name, text)):
                yield found


def _check_combined(around: Surroundings, *, is_moving: bool) -> Iterator[Finding]:
    """Check several sources together; ``is_moving``: whether they still name TorchServe."""
    served = next((fact.value for fact in around.commands if fact.value.in_container), None)
    names_logs = around.logging or (served is not None and "--log-config" in served.arguments)
    if is_moving and served is not None and not names_logs:
        yield finding(
            "console-log",
            served.place,
            "The output of a container contains neither the access log nor the metrics.",
            "They are in logs/access_log.log and logs/ts_metrics.log, or as set by --log-config.",
        )
    installed = {fact.value for fact in around.packages}
    theirs = {"torchserve", "torchserve-nightly"} & installed
    if theirs and "marserve" in installed:
        yield finding(
            "two-servers",
            Place("."),
            f"{' and '.join(sorted(theirs))} and marserve are installed by the same setup. In one "
            "environment, files of one replace files of the other.",
            "Install one of them.",
        )
