"""Checks of log4j files and metrics.yaml, by the server's readers."""

import re
from collections.abc import Iterator

from marserve.frontend.configuration.properties import ConfigError
from marserve.frontend.logs.config import read_log_config
from marserve.frontend.logs.log4j import Translation
from marserve.frontend.telemetry.metrics_config import (
    MetricsConfigError,
    parse_metrics_config,
    unfit_name,
)
from marserve.tools.doctor.findings import Finding, Place
from marserve.tools.doctor.rules import finding
from marserve.tools.doctor.sources import Source

_PLACES = {"LOG_LOCATION": "logs", "METRICS_LOCATION": "logs"}
# Remarks about values that log4j resolves at run time.
_HARMLESS = ("has no value", "monitorInterval")


def check_log4j(source: Source) -> Iterator[Finding]:
    """Report the parts of a log4j configuration that have no counterpart."""
    place = Place(source.name)
    try:
        config = read_log_config(source.path, _PLACES, content=source.content)
    except ConfigError as error:
        yield finding("not-read", place, str(error), "Correct the file or remove it.")
        return
    if not isinstance(config, Translation):
        return
    for remark in dict.fromkeys(config.remarks):
        if not any(word in remark for word in _HARMLESS):
            appender = re.match(r"Appender (.*?)(?: is left out)?:", remark)
            line = source.line_of(f'"{appender[1]}"') if appender else 0
            yield finding("log4j", Place(source.name, line), remark)
    if config.loggers:
        counts = f"{len(config.handlers)} appenders and {len(config.loggers)} loggers"
        yield finding("unchanged", place, f"{counts} of {source.name}")


def check_metrics(source: Source) -> Iterator[Finding]:
    """Check a metrics.yaml."""
    place = Place(source.name)
    try:
        config = parse_metrics_config(source.content)
    except MetricsConfigError as error:
        yield finding(
            "metrics-file",
            place,
            f"{error} The built-in metrics would be reported instead.",
            "Correct the file.",
        )
        return
    declared = [*config.ts.values(), *config.model.values()]
    for each in declared:
        if why := unfit_name(each):
            yield finding(
                "metrics-name",
                Place(source.name, source.line_of(each.name)),
                f"{each.name} is in the log only: {why}.",
                "Give it a name of letters, digits and underscores.",
            )
    yield finding("unchanged", place, f"{len(declared)} metrics of {source.name}")
