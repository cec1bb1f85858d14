"""The rules of the doctor: level, documentation page and meaning.

docs/reference/doctor-rules.md is generated from them.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from marserve.tools.doctor.compatibility import link
from marserve.tools.doctor.findings import Finding, Fix, Level, Place

_KEYS = link("Configuration keys")
_COMMANDS = link("Command line")
_ARCHIVES = link("Archives")
_HANDLERS = link("Handlers")
_IMPORTS = link("Import names")
_METRICS = link("Metrics")
_YAML = link("model-config.yaml")
_LOGS = link("Logs")
_DOCKER = "docs/platforms/docker.md"
_DOCKER_END = f"{_DOCKER}#what-starts-and-ends-the-container"
_KSERVE = "docs/platforms/kserve.md#what-to-change"
_INSTALL = "docs/moving-from-torchserve.md#the-server"
_SECURITY = "docs/security.md"
_BATCHING = "docs/batching.md"


@dataclass(frozen=True)
class Rule:
    """A kind of finding; ``meaning`` completes "this rule is about"."""

    level: Level
    link: str
    meaning: str


RULES = {
    # Cannot work
    "config-value": Rule(
        Level.BLOCKS, _KEYS, "a value of config.properties with which the server does not start"
    ),
    "config-file": Rule(Level.BLOCKS, _KEYS, "a configuration file that cannot be read"),
    "java-plugins": Rule(
        Level.BLOCKS, link("What comes later"), "plugins written in Java, and their endpoints"
    ),
    "archive-unusable": Rule(
        Level.BLOCKS, _ARCHIVES, "an archive, or its manifest, that cannot be registered"
    ),
    "archive-file": Rule(
        Level.BLOCKS, _ARCHIVES, "a file that a manifest names and the archive does not contain"
    ),
    "handler-import": Rule(
        Level.BLOCKS, _IMPORTS, "an import of a TorchServe module that marserve does not provide"
    ),
    "handler-name": Rule(
        Level.BLOCKS, _HANDLERS, "a handler that is neither in the archive nor in marserve"
    ),
    "handler-class": Rule(
        Level.BLOCKS,
        _HANDLERS,
        "a handler file without the function, and without exactly one class",
    ),
    "handler-coroutine": Rule(
        Level.BLOCKS,
        "docs/writing-handlers.md",
        "a handler that is a coroutine without `asyncCommunication`",
    ),
    "handler-syntax": Rule(
        Level.BLOCKS, _HANDLERS, "Python code that this interpreter cannot parse"
    ),
    "handler-load": Rule(
        Level.BLOCKS, "docs/writing-handlers.md", "an archive that `--load` could not load"
    ),
    "model-yaml": Rule(Level.BLOCKS, _YAML, "a model-config.yaml that the server refuses"),
    "runtime": Rule(Level.BLOCKS, _ARCHIVES, "a model for TorchServe's C++ backend"),
    "workflow": Rule(
        Level.BLOCKS, "docs/workflows.md", "a workflow specification that the server refuses"
    ),
    "command-flag": Rule(Level.BLOCKS, _COMMANDS, "a flag that `torchserve` refuses"),
    "ts-in-requirements": Rule(
        Level.BLOCKS,
        _HANDLERS,
        "requirements of a model that install TorchServe, whose `ts` hides marserve's",
    ),
    "two-servers": Rule(
        Level.BLOCKS, _INSTALL, "TorchServe and marserve in one environment or image"
    ),
    # Change
    "image": Rule(Level.CHANGE, _DOCKER, "an image that contains TorchServe"),
    "package": Rule(Level.CHANGE, _INSTALL, "an installed package of TorchServe"),
    "kserve-runtime": Rule(
        Level.CHANGE, _KSERVE, "an InferenceService that uses KServe's TorchServe runtime"
    ),
    "kserve-port": Rule(Level.CHANGE, _KSERVE, "a TorchServe port in an InferenceService"),
    # Check
    "config-ignored": Rule(
        Level.CHECK, _KEYS, "a key or value that is ignored, probably unintentionally"
    ),
    "config-lines": Rule(Level.CHECK, _KEYS, "settings with a missing line break between them"),
    "cpu-launcher": Rule(
        Level.CHECK, _KEYS, "torch's launcher for CPUs, which may not fit the server's machine"
    ),
    "config-variable": Rule(
        Level.CHECK, link("Environment variables"), "a variable that the configuration needs"
    ),
    "config-path": Rule(Level.CHECK, _KEYS, "a path of the configuration that does not exist"),
    "environment-ignored": Rule(
        Level.CHECK,
        link("Environment variables"),
        "a TS_ variable that has no effect, because the file does not allow it",
    ),
    "model-missing": Rule(
        Level.CHECK, link("models and snapshots"), "a model to load that is not in the model store"
    ),
    "handler-requirement": Rule(
        Level.CHECK, _HANDLERS, "an import that is neither installed here nor required"
    ),
    "handler-old": Rule(Level.CHECK, _HANDLERS, "an import of an abandoned package"),
    "requirements-off": Rule(
        Level.CHECK, _KEYS, "requirements in an archive that no configuration installs"
    ),
    "model-yaml-ignored": Rule(
        Level.CHECK, _YAML, "a key of model-config.yaml that is not read, or a wrong value"
    ),
    "metrics-file": Rule(Level.CHECK, _METRICS, "a metrics.yaml that cannot be used"),
    "not-read": Rule(
        Level.CHECK,
        "",
        "a file, or a part of a server's responses, that is not examined",
    ),
    "custom-metrics": Rule(
        Level.CHECK, _METRICS, "metrics of a running server that are not built in"
    ),
    "model-not-ready": Rule(
        Level.CHECK, "docs/reliability.md", "a served model without workers that are READY"
    ),
    "crash-loop": Rule(
        Level.CHECK, "docs/reliability.md", "a served model whose workers keep failing"
    ),
    "probe": Rule(
        Level.CHECK,
        _SECURITY,
        "a probe of a path that needs a token, or of a process that does not exist",
    ),
    "java-process": Rule(
        Level.CHECK, _COMMANDS, "a script that looks for the Java process of TorchServe"
    ),
    "model-api": Rule(
        Level.CHECK, _SECURITY, "a registration in a script where the model API is disabled"
    ),
    "outlives-server": Rule(
        Level.CHECK, _DOCKER_END, "a container that continues after the end of its server"
    ),
    "grpc-extra": Rule(Level.CHECK, "docs/grpc.md", "a gRPC port that needs `marserve[grpc]`"),
    "s3-extra": Rule(Level.CHECK, _ARCHIVES, "archives in S3, which need `marserve[s3]`"),
    # Differs
    "tokens": Rule(
        Level.DIFFERS, _SECURITY, "requests that need a token, because a listener is not private"
    ),
    "config-no-effect": Rule(
        Level.DIFFERS, _KEYS, "keys without effect, most of which tuned the Java server"
    ),
    "config-refused": Rule(Level.DIFFERS, _KEYS, "a key with another meaning, or without effect"),
    "console-log": Rule(
        Level.DIFFERS, _LOGS, "a console that shows neither access log nor metrics"
    ),
    "log4j": Rule(Level.DIFFERS, _LOGS, "a part of a log4j file that has no counterpart"),
    "kserve-wrapper": Rule(
        Level.DIFFERS,
        "docs/platforms/kserve.md#what-differs-from-torchserve-with-its-wrapper",
        "variables for the wrapper in KServe's image",
    ),
    "no-effect-flag": Rule(Level.DIFFERS, _COMMANDS, "a flag of the command line without effect"),
    "metrics-name": Rule(Level.DIFFERS, _METRICS, "a metric that Prometheus cannot carry"),
    "endpoint": Rule(
        Level.DIFFERS, link("Endpoints"), "a path of the running server that marserve does not have"
    ),
    # Gains
    "batching": Rule(Level.GAINS, _BATCHING, "a model with several workers and no batches"),
    "queueing": Rule(Level.GAINS, _BATCHING, "requests with more waiting time than computing time"),
    "precision": Rule(
        Level.GAINS, "docs/performance-options.md", "an eager model on a GPU, in fp32"
    ),
    "compile": Rule(
        Level.GAINS,
        "docs/performance-options.md",
        "batch sizes that are compiled while requests wait",
    ),
    "probes": Rule(
        Level.GAINS, "docs/platforms/kubernetes.md#probes", "a container without a readiness probe"
    ),
    "no-java": Rule(Level.GAINS, _DOCKER, "an installed Java that is not needed"),
    # Works
    "unchanged": Rule(Level.WORKS, "docs/compatibility.md", "sources that work unchanged"),
}


def finding(
    rule: str, place: Place, what: str, do: str = "", *, fixes: Iterable[Fix] = (), link: str = ""
) -> Finding:
    """Return a finding of a rule, with its level and page."""
    of_rule = RULES[rule]
    return Finding(rule, of_rule.level, place, what, do, link or of_rule.link, tuple(fixes))
