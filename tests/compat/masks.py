"""What may differ between any two runs, and is masked before answers are compared.

Of an API description its structure is compared (paths, operations, parameters, answers), not its
texts and schemas: those are each server's own words.
"""

import json
import re
from collections.abc import Iterable
from typing import Any

from peers import Contestant
from wire import Answer

UUID = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
MASKS = (
    (r',\n        "state": "[A-Z]+"', ""),  # ours, of a worker
    (r'(?s),\n    "batchPolicy": .*?"batching": \{.*?\n    \}', ""),  # ours, behind TorchServe's
    (UUID, "<uuid>"),
    (r'"startTime": "\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"', '"startTime": <time>'),
    (r'("id": )"\d{4,5}"', r"\1<worker>"),
    (r'("memoryUsage": )\d+', r"\1<bytes>"),
    (r'("pid": )-?\d+', r"\1<pid>"),
    (r'(Bearer +)[\w-]{8}(?=")', r"\1<key>"),
    (r'("version": )"(?:\d+\.){2}\d+"', r"\1<version>"),
    (r'("createdOn": )"[^"]+"', r"\1<time>"),
    (r"boundary=-*[0-9a-f]{16,32}", "boundary=<boundary>"),
    (r'(hostname|Hostname)="[^"]*"', r'\1="<host>"'),
)


def masked(peer: Contestant, text: str, *, is_metrics: bool = False) -> str:
    """A text without what differs from run to run."""
    for name, port in peer.server.ports.items():
        text = text.replace(f":{port}", f":<{name} port>")
    text = text.replace(str(peer.directory), "<directory>").replace(peer.files, "<files>")
    for pattern, instead in MASKS:
        text = re.sub(pattern, instead, text)
    return _without_values(text) if is_metrics else text


def _without_values(page: str) -> str:
    """A metrics page as the set of its lines: no values, none of our own series."""
    lines = (re.sub(r" [-+0-9.eE]+(inf|NaN)?$", " <n>", line) for line in page.splitlines())
    shared = {line for line in lines if "marserve_" not in line}
    return "\n".join(sorted(shared))


def _outline(document: Any) -> str:
    """The structure of an API description."""
    lines = []
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            names = [parameter["name"] for parameter in operation.get("parameters", [])]
            summary = operation["operationId"], "deprecated" if operation.get("deprecated") else ""
            lines.append(f"{method} {path} {summary} {sorted(names)}")
    return "\n".join([document["openapi"], *lines])


def _body(peer: Contestant, answer: Answer) -> str:
    is_metrics = answer.header("content-type") == "text/plain; version=0.0.4; charset=utf-8"
    body = answer.body.decode("utf-8", "backslashreplace")
    if body.startswith('{\n  "openapi"'):
        return _outline(json.loads(body))
    if len(body) > 200_000:
        return f"{body[:20]}… {len(body)} characters"
    return masked(peer, body, is_metrics=is_metrics)


def aspects(peer: Contestant, answer: Answer) -> dict[str, str]:
    """An answer as a flat table of what is compared."""
    found = {
        "status": str(answer.status),
        "reason": answer.reason,
        "interim": ", ".join(map(str, answer.interim)),
        "cut": "the connection ended inside the body" if answer.cut else "",
        "body": _body(peer, answer),
    }
    if answer.chunks is not None:
        found["chunks"] = " | ".join(chunk.decode("latin-1") for chunk in answer.chunks)
    found |= {f"header {key}": masked(peer, value) for key, value in _headers(answer.headers)}
    return found


def _headers(headers: Iterable[tuple[str, str]]) -> Iterable[tuple[str, str]]:
    """Header names and values; a repeated name is numbered. Lengths follow from bodies."""
    seen: dict[str, int] = {}
    for name, value in headers:
        seen[name] = seen.get(name, 0) + 1
        text = "<n>" if name.lower() == "content-length" and value != "0" else value
        yield (f"{name} #{seen[name]}" if seen[name] > 1 else name), text
