"""Read the requests to send: files with bodies, JSON lines or yaml, HAR files, access logs."""

import base64
import json
import mimetypes
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from marserve.frontend.configuration.bounded_yaml import load_yaml
from marserve.tools.bench.payloads import MAX_BODY, Payload, read_payloads
from marserve.tools.doctor.comparison.exchange import Request
from marserve.tools.doctor.comparison.forms import multipart
from marserve.tools.doctor.errors import DoctorError
from marserve.tools.files import read_file

#: `... "POST /predictions/m HTTP/1.1" 200 ...`: a line of TorchServe's access log, and of others.
_LOGGED = re.compile(r'"([A-Z]+) (/\S*) HTTP/[\d.]+"')
#: Paths of requests that do not change the server.
_READING = re.compile(
    r"/(predictions|explanations|wfpredict)/.+"
    r"|/invocations"
    r"|/models/[^/]+/invoke"
    r"|/v1/models/[^/]+:(predict|explain)"
    r"|/v2/models/[^/]+(/versions/[^/]+)?/(infer|explain)"
    r"|/[^/]+(/[^/]+)?/predict"
)
_SAFE = ("GET", "HEAD", "OPTIONS")
_MEMBERS = {"method", "path", "headers", "body", "base64", "file", "form"}
_WITH_BODY = ("POST", "PUT")
_MAX_BYTES = 64 << 20


@dataclass
class Recorded:
    """The requests from all files.

    Attributes:
        requests: The requests to send, in order.
        left_out: Requests that were omitted, because they may change the server.
        sampled_from: Number of requests before the limit was applied.
    """

    requests: list[Request] = field(default_factory=list)
    left_out: list[Request] = field(default_factory=list)
    sampled_from: int = 0


def read_requests(
    files: Sequence[Path],
    inputs: Sequence[str],
    path: str,
    content_type: str = "",
    limit: int = 1000,
) -> Recorded:
    """Return the requests of files, and one for each input.

    Args:
        files: Files of requests; those of access logs get the inputs as bodies, in turn.
        inputs: Files, directories or patterns of bodies.
        path: Path to which inputs are posted; empty for the bodies of access logs.
        content_type: Content type of the inputs, instead of one derived from their names.
        limit: Maximum number of requests, selected evenly.

    Raises:
        BenchError: An input does not exist or cannot be read.
        DoctorError: A file does not exist or has a wrong format, or no request is left.
    """
    payloads = [each for pattern in inputs for each in _payloads(pattern, content_type)]
    found: list[Request] = []
    if path:
        found += [_posted(path, each, each.name) for each in payloads]
    for file in files:
        found += _read(file, [] if path else payloads)
    reading = [each for each in found if _is_reading(each)]
    left_out = [each for each in found if not _is_reading(each)]
    step = max(1.0, len(reading) / limit)
    taken = [reading[int(number * step)] for number in range(min(limit, len(reading)))]
    if not taken:
        raise DoctorError("There is nothing to send: --input with --model, or --requests FILE.")
    return Recorded(taken, left_out, len(reading))


def _payloads(pattern: str, content_type: str) -> list[Payload]:
    found = read_payloads(pattern)
    return [replace(each, content_type=content_type or each.content_type) for each in found]


def _posted(path: str, payload: Payload, source: str) -> Request:
    return Request("POST", path, {"Content-Type": payload.content_type}, payload.body, source)


def _is_reading(request: Request) -> bool:
    path = urlsplit(request.target).path
    return request.method in _SAFE or bool(_READING.fullmatch(path))


def _read(file: Path, payloads: Sequence[Payload]) -> list[Request]:
    try:
        text = read_file(file, _MAX_BYTES).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise DoctorError(f"Cannot read {file}: {why}.") from None
    try:
        document = _document(file, text)
    except Exception as error:  # noqa: BLE001 - the yaml parser raises many types of errors
        why = " ".join(str(error).split())
        raise DoctorError(f"{file} cannot be parsed: {why}.") from None
    if document is None:
        return _from_log(file, text, payloads)
    try:
        if isinstance(document, dict) and "log" in document:
            return [*_from_har(document["log"], file.name)]
        items = document if isinstance(document, list) else [document]
        return [
            _from_item(item, f"{file.name}:{number}", file.parent)
            for number, item in enumerate(items, 1)
        ]
    except ValueError as error:
        raise DoctorError(f"{file} has a request that is not understood: {error}") from None
    except (LookupError, TypeError, AttributeError, RecursionError):
        raise DoctorError(
            f"{file} has a request that is not understood: a part is missing, or of another type."
        ) from None


def _document(file: Path, text: str) -> Any:
    """Return the document of a file in JSON or yaml; None for an access log."""
    if file.suffix in (".yaml", ".yml"):
        return load_yaml(text)
    if not text.lstrip().startswith(("{", "[")):
        return None
    try:
        return json.loads(text)
    except ValueError:
        return [json.loads(line) for line in text.splitlines() if line.strip()]


def _from_log(file: Path, text: str, payloads: Sequence[Payload]) -> list[Request]:
    found = [
        (f"{file.name}:{number}", *line.groups())
        for number, each in enumerate(text.splitlines(), 1)
        if (line := _LOGGED.search(each))
    ]
    if not found:
        raise DoctorError(
            f"{file} has no requests: it is neither JSON, yaml nor HAR, nor an access log."
        )
    requests = [Request(method, target, source=line) for line, method, target in found]
    if not any(each.method in _WITH_BODY and _is_reading(each) for each in requests):
        return requests
    if not payloads:
        raise DoctorError(f"{file} contains no bodies of requests: add --input, without --model.")
    bodies = cycle(payloads)
    return [
        _posted(each.target, body, f"{each.source}, {body.name}")
        if each.method in _WITH_BODY and (body := next(bodies))
        else each
        for each in requests
    ]


def _from_item(item: Mapping[str, Any], source: str, folder: Path) -> Request:
    if not isinstance(item, dict) or "path" not in item:
        raise ValueError(f"{source} has no path.")
    if unknown := item.keys() - _MEMBERS:
        raise ValueError(f"{source} has {', '.join(sorted(unknown))}, which is not supported.")
    headers = {str(name): str(value) for name, value in (item.get("headers") or {}).items()}
    body, content_type = _body_of(item, folder)
    if content_type and not any(name.lower() == "content-type" for name in headers):
        headers["Content-Type"] = content_type
    method = str(item.get("method", "GET" if body is None else "POST")).upper()
    return Request(method, str(item["path"]), headers, body, source)


def _body_of(item: Mapping[str, Any], folder: Path) -> tuple[bytes | None, str]:
    kinds = [name for name in ("body", "base64", "file", "form") if item.get(name) is not None]
    if len(kinds) > 1:
        raise ValueError(f"one of {' and '.join(kinds)}")
    if not kinds:
        return None, ""
    value = item[kinds[0]]
    if kinds[0] == "form":
        return multipart([(str(name), *_field(of, folder)) for name, of in value.items()])
    if kinds[0] == "file":
        return _file(folder / value)
    if kinds[0] == "base64":
        return base64.b64decode(value, validate=True), ""
    if isinstance(value, str):
        return value.encode(), ""
    return json.dumps(value).encode(), "application/json"


def _field(value: Any, folder: Path) -> tuple[bytes, str, str]:
    """Return content, content type and file name of a field; @ at the start marks a file name."""
    if isinstance(value, str) and value.startswith("@"):
        content, content_type = _file(folder / value[1:])
        return content, content_type, Path(value[1:]).name
    text = value if isinstance(value, str) else json.dumps(value)
    return text.encode(), "", ""


def _file(path: Path) -> tuple[bytes, str]:
    try:
        content = read_file(path, MAX_BODY)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    return content, mimetypes.guess_type(path.name)[0] or "application/octet-stream"


def _from_har(log: Mapping[str, Any], name: str) -> Iterator[Request]:
    for number, entry in enumerate(log["entries"], 1):
        request = entry["request"]
        url = urlsplit(request["url"])
        headers = {
            each["name"]: each["value"]
            for each in request.get("headers", ())
            if not each["name"].startswith(":")  # of HTTP/2
        }
        target = quote(url.path or "/", safe="/%:@!$&'()*+,;=~") + f"?{url.query}" * bool(url.query)
        body, content_type = _posted_data(request.get("postData") or {})
        if content_type:
            headers = {key: of for key, of in headers.items() if key.lower() != "content-type"}
            headers["Content-Type"] = content_type
        yield Request(request["method"].upper(), target, headers, body, f"{name} {number}")


def _posted_data(data: Mapping[str, Any]) -> tuple[bytes | None, str]:
    """Return the body, and its content type if the body is built from a form's fields."""
    if text := data.get("text"):
        return base64.b64decode(text) if data.get("encoding") == "base64" else text.encode(), ""
    if not (fields := data.get("params")):
        return None, ""
    if "multipart" in data.get("mimeType", ""):
        return multipart(
            [
                (
                    each["name"],
                    each.get("value", "").encode(),
                    each.get("contentType", ""),
                    each.get("fileName", ""),
                )
                for each in fields
            ]
        )
    pairs = [(each["name"], each.get("value", "")) for each in fields]
    return urlencode(pairs).encode(), "application/x-www-form-urlencoded"
