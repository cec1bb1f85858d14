"""Checks of Kubernetes, KServe, Helm and compose: commands and probes of containers."""

import re
from collections.abc import Iterator
from typing import Any

from marserve.tools.doctor.documents import Container, container_of, containers_in
from marserve.tools.doctor.findings import Finding, Place
from marserve.tools.doctor.rules import finding
from marserve.tools.doctor.sources import Source
from marserve.tools.doctor.surroundings import Surroundings

_OWN_PORTS = {7070, 8085}
_WITH_TOKEN = re.compile(r"/(?:ping|models)\b")
_JAVA_PROCESS = re.compile(r"\bjava\b|org\.pytorch\.serve\.\w+")
_SERVES = re.compile(r"torchserve|marserve")


def check_containers(source: Source, document: Any, around: Surroundings) -> Iterator[Finding]:
    """Check each container of a document that runs a server."""
    is_kserve = _is_of(document, "serving.kserve.io")
    if is_kserve and document.get("kind") == "InferenceService":
        yield from _inference_service(source, document)
    for container in containers_in(document):
        words = " ".join(map(str, container.words))
        if not _SERVES.search(f"{container.image} {words}"):
            continue
        place = Place(source.name, source.line_of(container.image) if container.image else 0)
        yield from _probes(source, place, container, around, is_kserve=is_kserve)


def check_probe(source: Source, place: Place, text: str, around: Surroundings) -> Iterator[Finding]:
    """Check the path or process that a probe tests."""
    do = "Probe /ready: it needs no token, and reports whether the models are ready."
    asked = _WITH_TOKEN.search(text)
    if asked and not around.tokens_are_off(source):
        what = f"A probe requests {asked[0]}, which needs a token if requests need one."
        yield finding("probe", place, what, do)
    if found := _JAVA_PROCESS.search(text):
        what = f"A probe looks for the process {found[0]}; without Java it always fails."
        yield finding("probe", place, what, do, link="docs/platforms/kubernetes.md#probes")


def _is_of(document: Any, group: str) -> bool:
    return isinstance(document, dict) and str(document.get("apiVersion", "")).startswith(group)


def _inference_service(source: Source, document: Any) -> Iterator[Finding]:
    spec = _mapping(document.get("spec"))
    predictor = _mapping(spec.get("predictor"))
    model = _mapping(predictor.get("pytorch") or predictor.get("model"))
    is_pytorch = _mapping(model.get("modelFormat")).get("name") == "pytorch"
    runtime = str(model.get("runtime", ""))
    if "pytorch" not in predictor and not is_pytorch:
        return
    if runtime and "torchserve" not in runtime:
        return
    if not model.get("image"):  # otherwise check_images reports it
        yield finding(
            "kserve-runtime",
            Place(source.name, source.line_of("pytorch")),
            "KServe uses its runtime kserve-torchserve for pytorch: TorchServe and a wrapper.",
            "Apply deploy/kserve/runtime.yaml with your image. It replaces the runtime, and the "
            "InferenceService stays unchanged.",
        )
    container = container_of(model)
    for port in _OWN_PORTS & {*container.ports}:
        yield finding(
            "kserve-port",
            Place(source.name, source.line_of(f"containerPort: {port}")),
            f"containerPort {port} is a TorchServe port; KServe uses 8080 and, for gRPC, 8081.",
            "Remove it, or make it 8080 or 8081.",
        )
    for name in container.environment:
        if name == "CONFIG_PATH" or name.startswith("MODEL_LOAD_"):
            yield finding(
                "kserve-wrapper",
                Place(source.name, source.line_of(name)),
                f"{name} is not read: it configured the wrapper, which marserve does not need.",
                "Nothing to do; you can remove it.",
            )


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _probes(
    source: Source, place: Place, container: Container, around: Surroundings, *, is_kserve: bool
) -> Iterator[Finding]:
    yield from check_probe(source, place, str(container.probes), around)
    has_readiness = "readinessProbe" in container.probes or "healthcheck" in container.probes
    if not has_readiness and not is_kserve:
        how = "healthcheck" if container.is_service else "readinessProbe"
        yield finding(
            "probes",
            place,
            f"{container.name or 'The container'} has no {how}: requests arrive before its "
            "models are loaded.",
            f"Add a {how} that requests GET /ready on the inference port; it needs no token.",
        )
