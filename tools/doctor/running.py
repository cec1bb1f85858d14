"""``--url``: examine a running server, TorchServe or marserve, by its management interface.

The examination only reads. It does not find what only the server's files contain.
"""

import argparse
import math
import time
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any
from urllib.parse import quote

from marserve.tools.bench.client import Client
from marserve.tools.bench.errors import BenchError
from marserve.tools.bench.generator.destination import Destination
from marserve.tools.bench.options import key_of
from marserve.tools.doctor import compatibility
from marserve.tools.doctor.checks.gains import tune_command, unbatched
from marserve.tools.doctor.errors import DoctorError
from marserve.tools.doctor.findings import Finding, Place, Report
from marserve.tools.doctor.rules import finding
from marserve.tools.metrics_page import metric_families

_TIMEOUT = 20.0  # seconds for a response
_MAX_SECONDS = 300.0  # seconds for all responses
# Bytes of a response: values take up to 60 times the memory of their JSON, metrics 100 times.
_MAX_ANSWER = 2 << 20
_MAX_METRIC_LINE = 4096  # parsing time grows with the square of the length
_MAX_FINDINGS = 10_000
_MAX_NAME = 200  # characters of a server's text in a finding
_PAGE = 100
_SHOWN = 5  # names in a sentence
_REFUSED = (401, 403)
_NO_KEY = "Token Authorization failed"  # TorchServe's message, with status 400
_LATENCY = "ts_inference_latency_microseconds"
_QUEUE = "ts_queue_latency_microseconds"
_MIN_REQUESTS = 20  # for averages
_METHODS = ("get", "put", "post", "delete", "options", "head", "patch")


class _Server:
    """A client of the management listener, and of another one for metrics if given."""

    def __init__(self, options: argparse.Namespace) -> None:
        key = options.token or (options.key_file and key_of(options.key_file, "management"))
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.url = options.url.rstrip("/")
        self._is_trusting = options.insecure
        self._end = time.monotonic() + _MAX_SECONDS
        self._client = self._make(self.url, headers)
        self._metrics = self._make(options.metrics_url, {}) if options.metrics_url else None

    def _make(self, url: str, headers: Mapping[str, str]) -> Client:
        return Client(Destination(url, verify=not self._is_trusting), headers, timeout=_TIMEOUT)

    def ask(self, path: str, method: str = "GET") -> Any:
        """Return the document at a path; raise DoctorError for any other response."""
        if time.monotonic() > self._end:
            raise DoctorError(f"{self.url} did not answer everything within {_MAX_SECONDS:g} s.")
        answer = self._client.ask(method, path)
        if len(answer.body) > _MAX_ANSWER:
            raise DoctorError(
                f"{self.url}{_cut(path)} sends more than {_MAX_ANSWER >> 20} MiB in an answer."
            )
        document = answer.json()
        if answer.status in _REFUSED or _NO_KEY in answer.sentence:
            raise DoctorError(
                f"{self.url} requires its management key: --token KEY or --key-file key_file.json."
            )
        if not answer.is_success or document is None:
            raise DoctorError(
                f"{self.url}{_cut(path)} is not a management interface of TorchServe or marserve: "
                f"{answer.status} {answer.sentence}"
            )
        return document

    def metrics(self) -> str:
        """Return the text of the metrics; empty if they are not served."""
        try:
            client = self._metrics or self._metrics_beside()
            if client is None:
                return ""
            answer = client.ask("GET", "/metrics")
        except BenchError:
            return ""
        return answer.text if answer.is_success and len(answer.body) <= _MAX_ANSWER else ""

    def _metrics_beside(self) -> Client | None:
        """Return a client of the default metrics port: the management port plus 1."""
        head, _, port = self.url.rpartition(":")
        return self._make(f"{head}:{int(port) + 1}", {}) if port.isdigit() else None


def examine_server(options: argparse.Namespace) -> Report:
    """Return all findings about a server.

    Raises:
        BenchError: The server does not respond.
        DoctorError: The server does not respond as a management interface does.
    """
    server = _Server(options)
    report = Report()
    report.findings += islice(_examine(server, report.read), _MAX_FINDINGS)
    if len(report.findings) == _MAX_FINDINGS:
        what = f"Only the first {_MAX_FINDINGS} findings are listed."
        report.findings.append(finding("not-read", Place(server.url), what))
    return report


def _examine(server: _Server, read: list[str]) -> Iterator[Finding]:
    identity, paths = _description(server)
    read.append(f"{identity} at {server.url}")
    yield from _endpoints(server, paths)
    for name in _names(server):
        for described in _versions(server, name):
            model = f"{_cut(name)} {_cut(described.get('modelVersion', ''))}".strip()
            read.append(model)
            yield from _model(Place(model), _cut(name), described)
    yield from _metrics(Place(server.url), server.metrics())


def _cut(value: Any) -> str:
    return str(value)[:_MAX_NAME]


def _description(server: _Server) -> tuple[str, dict[str, list[str]]]:
    """Return name and version of the server, and its paths with their methods."""
    document = server.ask("/", "OPTIONS")
    info = document.get("info") if isinstance(document, dict) else None
    paths = document.get("paths") if isinstance(document, dict) else None
    if not isinstance(info, dict) or not isinstance(paths, dict):
        raise DoctorError(f"{server.url} does not describe itself as TorchServe does.")
    name = _cut(info.get("title", "a server")).removesuffix(" APIs")
    methods = {
        str(path): [method for method in of if method in _METHODS]
        for path, of in paths.items()
        if isinstance(of, dict)
    }
    return f"{name} {_cut(info.get('version', ''))}".strip(), methods


def _endpoints(server: _Server, paths: Mapping[str, list[str]]) -> Iterator[Finding]:
    known = {
        name
        for entry in compatibility.entries()
        if entry.section == "Endpoints" and entry.verdict != "later"
        for name in entry.names
    }
    segments = {_first(name.partition(" ")[2]) for name in known}
    for path, methods in paths.items():
        if _first(path) not in segments | {"prediction"}:  # sic, in TorchServe's document
            yield finding(
                "endpoint",
                Place(server.url),
                f"{', '.join(map(str.upper, methods))} {_cut(path)} is not served: "
                "it may belong to a plugin.",
                "Java plugins cannot be loaded; serve it beside marserve.",
            )
    yield finding("unchanged", Place(server.url), f"{len(paths)} paths of its description")


def _is_built_in(name: str) -> bool:
    names = (name, f"{name}_total")
    return any(compatibility.find("Metrics", each) is not None for each in names)


def _first(path: str) -> str:
    return path.lstrip("/").partition("/")[0]


def _names(server: _Server) -> Iterator[str]:
    path = f"/models?limit={_PAGE}"
    for _ in range(1000):
        document = server.ask(path)
        models = document.get("models") if isinstance(document, dict) else None
        if not isinstance(models, list):
            raise DoctorError(f"{server.url}/models does not list models.")
        yield from (str(each.get("modelName")) for each in models if isinstance(each, dict))
        token = document.get("nextPageToken")
        if not token:
            return
        path = f"/models?limit={_PAGE}&next_page_token={_quoted(str(token))}"


def _versions(server: _Server, name: str) -> Iterator[Mapping[str, Any]]:
    document = server.ask(f"/models/{_quoted(name)}/all")
    yield from (each for each in _list(document) if isinstance(each, dict))


def _quoted(name: str) -> str:
    return quote(name, safe="", errors="replace")  # JSON can contain a lone surrogate


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _model(place: Place, name: str, described: Mapping[str, Any]) -> Iterator[Finding]:
    workers = [each for each in _list(described.get("workers")) if isinstance(each, dict)]
    ready = sum(each.get("status") == "READY" for each in workers)
    if str(described.get("runtime", "")).upper() == "LSP":
        yield finding(
            "runtime",
            place,
            f"{name} is for TorchServe's C++ backend.",
            "Serve it with a handler in Python: base_handler loads TorchScript.",
        )
    if described.get("minWorkers", 0) and not ready:
        yield finding(
            "model-not-ready",
            place,
            f"{name} has no worker that is READY.",
            "Read its log before the move.",
        )
    if failures := described.get("crashLoop"):
        errors = (_cut(each["lastError"]) for each in workers if each.get("lastError"))
        yield finding(
            "crash-loop",
            place,
            f"The workers of {name} have failed {_cut(failures)} times in the last minutes: "
            f"{next(errors, 'those that failed are gone')}",
            "Read lastErrorStack and lastErrorOutput of its description, and its log.",
        )
    if not described.get("continuousBatching"):
        size, count = described.get("batchSize", 1), described.get("minWorkers", 0)
        if isinstance(size, int) and isinstance(count, int):
            yield from unbatched(place, name, size, count)
    yield finding("unchanged", place, f"{name}, {_cut(described.get('modelUrl', 'its archive'))}")


def _metrics(place: Place, text: str) -> Iterator[Finding]:
    """Report metrics that the user has declared, and long average times in queues."""
    lines = (line for line in text.splitlines() if len(line) <= _MAX_METRIC_LINE)
    families = metric_families("\n".join(lines))
    own = [name for name in dict.fromkeys(each.name for each in families) if not _is_built_in(name)]
    if own:
        shown = ", ".join(map(_cut, own[:_SHOWN])) + (" …" if len(own) > _SHOWN else "")
        yield finding(
            "custom-metrics",
            place,
            f"{len(own)} metrics are not built in: {shown}",
            "Keep its metrics.yaml, as metrics_config in config.properties.",
        )
    totals: dict[str, dict[str, float]] = {}
    for sample in (sample for family in families for sample in family.samples):
        name, model = sample.name.removesuffix("_total"), _cut(sample.labels.get("model_name", ""))
        if model:
            of_model = totals.setdefault(model, {})
            of_model[name] = of_model.get(name, 0.0) + sample.value
    for model, of in totals.items():
        count = of.get("ts_inference_requests", 0.0)
        waited, took = of.get(_QUEUE, 0.0), of.get(_LATENCY, 0.0)
        if _MIN_REQUESTS <= count < math.inf and took / 2 < waited < math.inf and took > 0:
            yield finding(
                "queueing",
                place,
                f"Requests of {model} wait {waited / count / 1000:.0f} ms of the "
                f"{took / count / 1000:.0f} ms that they take.",
                f"Batches or a latency goal increase the throughput: {tune_command(model)}",
            )
