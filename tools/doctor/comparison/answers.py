"""What of two answers to the same request differs, as findings."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from marserve.tools.bench.client import Answer
from marserve.tools.doctor.comparison.bodies import compare_bodies
from marserve.tools.doctor.findings import Level

#: Rules of a comparison: how much each weighs, and what it is about.
RULES = {
    "no-answer": (Level.BLOCKS, "a request that the new server does not answer"),
    "status": (Level.BLOCKS, "a success that is an error on the other server, or the reverse"),
    "body": (Level.BLOCKS, "a body that says something else"),
    "header": (Level.BLOCKS, "a header that is missing, or has another value"),
    "stopped": (Level.BLOCKS, "a server that gave no answer ten times in a row"),
    "slower": (Level.BLOCKS, "a median latency above --max-ratio times the old one"),
    "old-no-answer": (Level.CHECK, "a request that the old server does not answer"),
    "unsteady": (Level.CHECK, "what differs between answers of the old server itself, too"),
    "other-error": (Level.DIFFERS, "an error with another status, type or message"),
    "new-header": (Level.DIFFERS, "a header that only the new server sends"),
    "streaming": (Level.DIFFERS, "an answer that only one of the servers sends in pieces"),
}
#: They say when, by whom and how an answer was sent; bodies are compared themselves.
_NOT_COMPARED = {
    *("date", "server", "via", "x-request-id", "connection", "keep-alive", "transfer-encoding"),
    *("content-length", "retry-after", "trailer", "ts_stream_next"),
}


@dataclass(frozen=True)
class Rules:
    """What counts as the same.

    Attributes:
        tolerance: By how much numbers may differ.
        members: Members of JSON objects that are not compared.
        headers: Names of headers that are not compared, in small letters.
    """

    tolerance: float
    members: Collection[str] = ()
    headers: Collection[str] = ()


@dataclass(frozen=True)
class Mismatch:
    """One way in which two answers differ.

    Attributes:
        rule: Of `RULES`.
        what: In words.
        about: What of the answer it is: the same for the same of other answers.
    """

    rule: str
    what: str
    about: str = ""


def differences(old: Answer, new: Answer, rules: Rules) -> tuple[list[Mismatch], float]:
    """How the new answer differs, and the largest difference of two numbers."""
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
    if old.status != new.status:
        what = f'status {old.status} and {new.status} "{new.sentence}"'
        yield Mismatch("other-error", what, "error")
    elif (old.json() or old.body) != (new.json() or new.body):
        what = f'status {old.status} with "{old.sentence}" and "{new.sentence}"'
        yield Mismatch("other-error", what, "error")


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
