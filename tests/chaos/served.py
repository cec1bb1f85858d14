"""The models of the campaign, one for each mode of serving, and the requests they get."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from servers import Server, make_archive, make_workflow

HANDLERS = Path(__file__).with_name("handlers")
RESPONSE_SECONDS = 3  # after which a worker counts as hung
STARTUP_SECONDS = 8
_TIMEOUTS = f"responseTimeout: {RESPONSE_SECONDS}\nstartupTimeout: {STARTUP_SECONDS}\n"
#: What a request may do to its worker, and the statuses that its sender may get for it.
MISDEEDS: Mapping[str, frozenset[int]] = {
    "raise": frozenset({503}),
    "refuse": frozenset({418}),
    "memory": frozenset({507}),
    "exit": frozenset({500}),
    "sys.exit": frozenset({500, 503}),
    "hang": frozenset({500, 504}),  # a coroutine among others that answer: when its time is over
    "poison": frozenset({500, 503}),
    "child": frozenset({200}),
}
#: Those that cost a worker.
CRASHES = frozenset({"exit", "sys.exit", "hang", "poison"})


@dataclass(frozen=True)
class Served:
    """A model and how it is served.

    Attributes:
        form: How answers look: text, list, steps or sequence; ``streams``: they come in pieces.
        workflow: The workflow of which it is a node, and that requests are sent to.
        behind: The models whose failures are its own.
    """

    name: str
    handler: str = "batched"
    config: str = ""
    query: Mapping[str, Any] = field(default_factory=dict)
    workers: int = 2
    form: str = "text"
    workflow: str = ""
    behind: tuple[str, ...] = ()

    @property
    def streams(self) -> bool:
        """Whether an answer begins before it is complete."""
        return self.form in ("pieces", "steps")

    def pack(self, store: Path, version: str = "1.0", name: str = "") -> Path:
        """Make its archive in the model store."""
        return make_archive(
            store,
            HANDLERS / f"{self.handler}.py",
            name or self.name,
            _TIMEOUTS + self.config,
            extra_files=str(HANDLERS / "orders.py"),
            version=version,
        )

    def install(self, server: Server) -> None:
        """Pack it and register it, or its workflow."""
        if self.workflow:
            self.pack(server.store)
            functions = (HANDLERS / "workflow.py").read_text()
            make_workflow(server.store, self.workflow, _WORKFLOW.format(self.name), functions)
            self.register_workflow(server)
            return
        query = {"initial_workers": self.workers, "synchronous": "true", **self.query}
        answer = server.register(self.pack(server.store), **query)
        assert answer.status_code == 200, answer.text

    def register_workflow(self, server: Server) -> None:
        """Register its workflow, which is packed already."""
        answer = server.management("POST", f"/workflows?url={self.workflow}.war")
        assert answer.status_code == 200, answer.text


# A worker counts as hung when it is silent, not when one coroutine of many takes long: what bounds
# such a request is its own time.
_ASYNCHRONOUS = "asyncCommunication: true\noutstandingBatches: 16\nclientTimeoutInMills: 15000\n"
_SEQUENCES = "sequenceBatching: true\nsequenceMaxIdleMSec: 60000\nmaxNumSequence: 5000\n"
_WORKFLOW = """
models: {{echo: {{url: {}.mar, max-workers: 2}}}}
dag: {{start: [side, echo], side: [end], echo: [end]}}
"""
SERVED = (
    Served("single", query={"batch_size": 1}),
    Served("batched", query={"batch_size": 8, "max_batch_delay": 10}),
    Served("adaptive", query={"batch_size": 8, "batch_policy": "adaptive"}),
    Served("ahead", config="outstandingBatches: 3\n", query={"batch_size": 4}),
    Served("lists", config="dynamicBatchSize: true\n", query={"batch_size": 4}, form="list"),
    Served("streaming", "streaming", query={"batch_size": 4}, form="pieces"),
    Served("stepping", "stepping", "continuousBatching: true\n", {"batch_size": 4}, form="steps"),
    Served("asynchronous", "asynchronous", _ASYNCHRONOUS),
)
SEQUENCES = Served("sequences", "stateful", _SEQUENCES, {"batch_size": 4}, form="sequence")
CALLER = Served("caller", "caller", _ASYNCHRONOUS, behind=("batched",))
FLOW = Served("flow__echo", workflow="flow")
ALL = (*SERVED, SEQUENCES, CALLER, FLOW)


# Received in place by one side or both, or by neither.
_LARGE_BYTES = (20_000, 100_000, 1_000_000)
_LARGE_SHARE = 0.1


@dataclass(frozen=True)
class Request:
    """A prediction, and what its answer must say."""

    model: Served
    token: str
    body: bytes
    expected: str
    misdeed: str = ""

    @property
    def path(self) -> str:
        """Where it goes."""
        workflow = self.model.workflow
        return f"/wfpredict/{workflow}" if workflow else f"/predictions/{self.model.name}"


def make_request(model: Served, token: str, rng: Random, **order: Any) -> Request:
    """A request of random size and duration; ``order`` says more, such as ``do``."""
    size = 2000 if rng.random() < 0.05 else rng.randint(1, 20)  # some answers need several packets
    repeat = rng.randint(1, 5) if model.form == "steps" else size
    order = {"token": token, "repeat": repeat, "ms": rng.choice((0, 1, 1, 5, 20)), **order}
    answer = " ".join([token] * order["repeat"])
    if model.form not in ("list", "steps") and rng.random() < _LARGE_SHARE:
        filler = order["filler"] = rng.randbytes(rng.choice(_LARGE_BYTES) // 2).hex()
        answer += f" {hashlib.sha256(filler.encode()).hexdigest()} {filler}"
    misdeed = order.get("do", "")
    if model.form == "list":
        items = [{**order, "token": f"{token}.{number}"} for number in range(rng.randint(1, 6))]
        for item in items[1:]:
            item.pop("do", None)
        answers = [answer.replace(token, item["token"]) for item in items]
        return Request(model, token, json.dumps(items).encode(), json.dumps(answers), misdeed)
    if model.form == "pieces":
        answer = " ".join([answer] * 4)
    elif model.form == "steps":
        answer += " "
    elif model.form == "sequence":
        answer += f" {order.get('step', 1)}"
    return Request(model, token, json.dumps(order).encode(), answer, misdeed)


def is_expected(request: Request, text: str) -> bool:
    """Whether an answer is that of the request, and whole."""
    if request.model.form != "list":
        return text == request.expected
    try:
        return bool(json.loads(text) == json.loads(request.expected))
    except ValueError:
        return False
