"""The differences between two responses to the same request."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from marserve.tools.bench.client import Answer
from marserve.tools.doctor.comparison.bodies import compare_bodies
from marserve.tools.doctor.findings import Level

#: Rules of a comparison: level and meaning of each.
RULES = {
    "no-answer": (Level.BLOCKS, "a request that the new server does not answer"),
    "status": (Level.BLOCKS, "a success on one server and an error on the other"),
    "body": (Level.BLOCKS, "a body with another content"),
    "header": (Level.BLOCKS, "a header that is missing, or has another value"),
    "stopped": (Level.BLOCKS, "a server that did not answer ten times in a row"),
    "slower": (Level.BLOCKS, "a median latency above --max-ratio times the old one"),
    "old-no-answer": (Level.CHECK, "a request that the old server does not answer"),
    "unsteady": (Level.CHECK, "a difference that also occurs between answers of the old server"),
    "other-error": (Level.DIFFERS, "an error with another status, type or message"),
    "new-header": (Level.DIFFERS, "a header that only the new server sends"),
    "streaming": (Level.DIFFERS, "an answer that only one of the servers sends in pieces"),
}
#: Headers that describe the transfer: time, server, connection and length.
_NOT_COMPARED = {
    "date",
    "server",
    "via",
    "x-request-id",
    "connection",
    "keep-alive",
    "transfer-encoding",
    "content-length",
    "retry-after",
    "trailer",
    "ts_stream_next",
}


@dataclass(frozen=True)
class Rules:
    """The criteria of equality.

    Attributes:
        tolerance: Allowed difference of numbers.
        members: Members of JSON objects that are not compared.
        headers: Lowercase names of headers that are not compared.
    """

    tolerance: float
    members: Collection[str] = ()
    headers: Collection[str] = ()


@dataclass(frozen=True)
class Mismatch:
    """A difference between two responses.

    Attributes:
        rule: Name of a rule in `RULES`.
        what: Description of the difference.
        about: The part of the response that differs, to match differences between responses.
    """

    rule: str
    what: str
    about: str = ""


def differences(old: Answer, new: Answer, rules: Rules) -> tuple[list[Mismatch], float]:
    """Return the differences of the new response, and the largest difference of numbers."""
    if old.problem or new.problem:
        rule = "old-no-answer" if old.problem else "no-answer"
        return [Mismatch(rule, f"no answer: {old.problem or new.problem}", "answer")], 0.0
    if old.is_success != new.is_success:
        what = f"status {old.status} and {new.status}"
        what += f' "{(old if new.is_success else new).sentence}"'
        return [Mismatch("status", what, "status")], 0.0
    if not old.is_success:
        return [*_errors(old, new)], 0.0
    body = compare_bodies(old, new, rules.tolerance, rules.members)
    found = [*_headers(old, new, rules)]
    if old.status != new.status:
        found.insert(0, Mismatch("status", f"status {old.status} and {new.status}", "status"))
    if body.what:
        found.insert(0, Mismatch("body", body.what, "body"))
    if old.is_streamed != new.is_streamed:
        who = "old" if old.is_streamed else "new"
        found.append(Mismatch("streaming", f"only the {who} server sends it in pieces", "pieces"))
    return found, body.largest


def _errors(old: Answer, new: Answer) -> Iterator[Mismatch]:
    old, new = map(_without_id, (old, new))
    if old.status != new.status:
        what = f'status {old.status} and {new.status} "{new.sentence}"'
        yield Mismatch("other-error", what, "error")
    elif (old.json() or old.body) != (new.json() or new.body):
        what = f'status {old.status} with "{old.sentence}" and "{new.sentence}"'
        yield Mismatch("other-error", what, "error")


def _without_id(answer: Answer) -> Answer:
    """Return an error whose message does not contain the id of its request."""
    request_id = answer.headers.get("x-request-id", "").encode()
    return replace(answer, body=answer.body.replace(request_id, b"ID")) if request_id else answer


def _headers(old: Answer, new: Answer, rules: Rules) -> Iterator[Mismatch]:
    left_out = _NOT_COMPARED | {*rules.headers}
    for name in sorted((old.headers.keys() | new.headers.keys()) - left_out):
        mine, yours = old.headers.get(name), new.headers.get(name)
        if mine is None:
            yield Mismatch("new-header", f"header {name}: none and {yours}", name)
        elif yours is None or _normal(mine) != _normal(yours):
            yield Mismatch("header", f"header {name}: {mine} and {yours or 'none'}", name)


def _normal(value: str) -> str:
    return "".join(value.split()).lower()
