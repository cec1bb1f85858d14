"""Builds the answer of a workflow from the outputs of its leaves."""

import http
import json
from collections.abc import Mapping

from marserve.backend.protocol import Buffer, Prediction
from marserve.frontend.aio.long_work import Steps
from marserve.frontend.errors import ServeError

_JSON = "application/json"
_PHRASES = {status.value: status.phrase for status in http.HTTPStatus}


def answer_of(outputs: Mapping[str, Prediction]) -> Steps[Prediction]:
    """Return the output of a single leaf unchanged, or a JSON object with a member for each leaf.

    The output of a single leaf keeps the status and headers of its handler. Its default content
    type is JSON, as in TorchServe, and it gets the standard reason phrase.

    Raises:
        ServeError: One of several outputs is not text.
    """
    if len(outputs) == 1:
        [output] = outputs.values()
        names = {name.lower() for name in output.headers}
        headers = {} if "content-type" in names else {"content-type": _JSON}
        yield from ()
        reason = output.reason or _PHRASES.get(output.status, "")
        return Prediction(output.body, output.status, reason, headers | output.headers)
    pieces: list[bytes] = []
    for name, output in outputs.items():
        before = f"{',' if pieces else '{'}\n  {json.dumps(name, ensure_ascii=False)}: "
        pieces += (before.encode(), _json_text(name, output.body))
        yield
    body = b"".join((*pieces, b"\n}\n"))  # bytes, because text would be copied
    return Prediction(body, 200, _PHRASES[200], {"content-type": _JSON})


def _json_text(name: str, body: Buffer) -> bytes:
    """Return an output as JSON: unchanged if it is JSON, else as a string."""
    try:
        text = bytes(body).decode()
    except UnicodeDecodeError as error:
        raise ServeError(
            f"The output of {name} is neither JSON nor text, and the workflow has other leaves."
        ) from error
    try:
        json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False).encode()
    return text.strip().encode()


def _refuse_constant(name: str) -> None:
    """Refuse NaN and infinities, which are not JSON."""
    raise ValueError(name)
