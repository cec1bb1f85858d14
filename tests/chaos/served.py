"""The models of the campaign, one for each mode of serving, and the requests they get."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import catalog_file
from servers import Server, make_archive, make_workflow, wait_for

from marserve.frontend.configuration.setting import camel_case

HANDLERS = Path(__file__).with_name("handlers")
RESPONSE_SECONDS = 3  # after which a worker counts as hung
STARTUP_SECONDS = 8
_TIMEOUTS = f"responseTimeout: {RESPONSE_SECONDS}\nstartupTimeout: "
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
    # Of an engine. Those of a stream that has begun have no status.
    "die": frozenset({500}),
    "wait": frozenset({500, 504}),
    "flood": frozenset({500}),
    "break": frozenset({503}),
}
ENGINE_MISDEEDS = frozenset({"die", "wait", "flood", "break"})
#: Those that cost a worker.
CRASHES = frozenset({"exit", "sys.exit", "hang", "poison", "die", "wait"})
#: The routes of models below /v1, by their form.
_OPENAI = {"completion": "completions", "embeddings": "embeddings", "rerank": "rerank"}


@dataclass(frozen=True)
class Served:
    """A model and how it is served.

    Attributes:
        form: How answers look: text, list, steps or sequence; ``streams``: they come in pieces. Or
            those of OpenAI's routes: embeddings, rerank, completion (of an engine).
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
    startup_seconds: int = STARTUP_SECONDS

    @property
    def streams(self) -> bool:
        """Whether an answer begins before it is complete."""
        return self.form in ("pieces", "steps")

    @property
    def is_plain(self) -> bool:
        """Whether a request may be a file of a form, or a message of gRPC."""
        return self.form != "list" and self.form not in _OPENAI

    @property
    def is_engine(self) -> bool:
        """Whether requests are relayed to an engine, each by itself."""
        return self.form == "completion"

    @property
    def misdeeds(self) -> frozenset[str]:
        """What a request to it may ask for."""
        return ENGINE_MISDEEDS if self.is_engine else frozenset(MISDEEDS) - ENGINE_MISDEEDS

    def pack(self, store: Path, version: str = "1.0", name: str = "") -> Path:
        """Make its archive in the model store."""
        own = HANDLERS / f"{self.handler}.py"
        return make_archive(
            store,
            own if own.exists() else self.handler,
            name or self.name,
            f"{_TIMEOUTS}{self.startup_seconds}\n{self.config}",
            extra_files=str(HANDLERS / "orders.py"),
            version=version,
        )

    def install(self, server: Server, catalog: Path | None) -> None:
        """Pack it and register it, by the catalog if there is one; or its workflow."""
        if self.workflow:
            self.pack(server.store)
            functions = (HANDLERS / "workflow.py").read_text()
            make_workflow(server.store, self.workflow, _WORKFLOW.format(self.name), functions)
            self.register_workflow(server)
            return
        archive = self.pack(server.store)
        if catalog is not None:
            settings = {camel_case(name): value for name, value in self.query.items()}
            entry = {"url": archive.name, "minWorkers": self.workers, **settings}
            catalog_file.change(catalog, self.name, {"1.0": entry})
            wait_for(lambda: server.inference("GET", f"/ready?model={self.name}").ok)
            return
        query = {"initial_workers": self.workers, "synchronous": "true", **self.query}
        answer = server.register(archive, **query)
        assert answer.status_code == 200, answer.text

    def register_workflow(self, server: Server) -> None:
        """Register its workflow, which is packed already."""
        answer = server.management("POST", f"/workflows?url={self.workflow}.war")
        assert answer.status_code == 200, answer.text


# A worker counts as hung when it is silent, not when one coroutine of many takes long: what bounds
# such a request is its own time.
_ASYNCHRONOUS = "asyncCommunication: true\noutstandingBatches: 16\nclientTimeoutInMills: 15000\n"
_SEQUENCES = "sequenceBatching: true\nsequenceMaxIdleMSec: 60000\nmaxNumSequence: 5000\n"
_OPENAI_ROWS = "openai: {}\njobQueueSize: 500\n"
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
_ENGINE = f"{_ASYNCHRONOUS}handler: {{model_path: any}}\n"
# A program is started, where other workers are forked: a busy machine takes its time.
ENGINE = Served("engine", "vllm_handler", _ENGINE, form="completion", startup_seconds=20)
EMBEDDINGS, RERANK = (
    Served(form, "openai_rows", _OPENAI_ROWS.format(form), {"batch_size": 8}, form=form)
    for form in ("embeddings", "rerank")
)
ALL = (*SERVED, SEQUENCES, CALLER, FLOW, ENGINE, EMBEDDINGS, RERANK)


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
    streams: bool = False  # whether the answer begins before it is complete

    @property
    def path(self) -> str:
        """Where it goes."""
        if self.model.form in _OPENAI:
            return f"/v1/{_OPENAI[self.model.form]}"
        workflow = self.model.workflow
        return f"/wfpredict/{workflow}" if workflow else f"/predictions/{self.model.name}"


def make_request(model: Served, token: str, rng: Random, **order: Any) -> Request:
    """A request of random size and duration; ``order`` says more, such as ``do``."""
    size = 2000 if rng.random() < 0.05 else rng.randint(1, 20)  # some answers need several packets
    repeat = rng.randint(1, 5) if model.form == "steps" else size
    order = {"token": token, "repeat": repeat, "ms": rng.choice((0, 1, 1, 5, 20)), **order}
    if model.form not in ("list", "steps") and rng.random() < _LARGE_SHARE:
        order["filler"] = rng.randbytes(rng.choice(_LARGE_BYTES) // 2).hex()
    misdeed, answer = order.get("do", ""), _answer(order)
    if model.is_engine:
        return _completion(model, token, misdeed, answer, rng.random() < 0.5)
    if not model.is_plain:
        items = [{**order, "token": f"{token}.{number}"} for number in range(rng.randint(1, 6))]
        for item in items[1:]:
            item.pop("do", None)
            item.pop("filler", None)
        sent, expected = _list(model, token, items)
        return Request(model, token, json.dumps(sent).encode(), json.dumps(expected), misdeed)
    if model.form == "pieces":
        answer = " ".join([answer] * 4)
    elif model.form == "steps":
        answer += " "
    elif model.form == "sequence":
        answer += f" {order.get('step', 1)}"
    return Request(model, token, json.dumps(order).encode(), answer, misdeed, model.streams)


def flood_request(model: Served) -> Request:
    """A request to an engine for a stream of 40 MB."""
    sent = json.dumps({"model": model.name, "prompt": "flood", "stream": True})
    events = (f"data: {number:09}{'x' * 983}\n\n" for number in range(40_000))
    return Request(model, "flood", sent.encode(), "".join(events), streams=True)


def is_expected(request: Request, text: str) -> bool:
    """Whether an answer is that of the request, and whole; an object may have more members."""
    if text == request.expected or request.model.is_plain or request.streams:
        return text == request.expected
    expected = json.loads(request.expected)
    try:
        found = json.loads(text)
        if isinstance(expected, dict):
            found = {name: found[name] for name in expected}
    except (ValueError, TypeError, KeyError):
        return False
    return bool(found == expected)


def _answer(order: Mapping[str, Any]) -> str:
    """What ``answer`` of handlers/orders.py returns."""
    words = [order["token"]] * order["repeat"]
    if filler := order.get("filler"):
        words += [hashlib.sha256(filler.encode()).hexdigest(), filler]
    return " ".join(words)


def _list(model: Served, token: str, items: list[dict[str, Any]]) -> tuple[object, object]:
    """What a request with these orders is, and what is answered; see handlers/openai_rows.py."""
    answers, texts, count = [*map(_answer, items)], [*map(json.dumps, items)], len(items)
    if model.form == "list":
        return items, answers
    query = token if model.form == "rerank" else ""
    digests = [hashlib.sha256((query + answer).encode()).digest() for answer in answers]
    if model.form == "embeddings":
        data = [
            {"object": "embedding", "index": index, "embedding": [*digest]}
            for index, digest in enumerate(digests)
        ]
        usage = {"prompt_tokens": count, "total_tokens": count}
        expected = {"object": "list", "data": data, "model": model.name, "usage": usage}
        return {"model": model.name, "input": texts}, expected
    scores = [int.from_bytes(digest[:4], "big") for digest in digests]
    results = [
        {"index": index, "relevance_score": scores[index], "document": {"text": texts[index]}}
        for index in sorted(range(count), key=lambda index: -scores[index])
    ]
    expected = {"results": results, "model": model.name, "usage": {"total_tokens": count}}
    return {"model": model.name, "query": query, "documents": texts}, expected


def _completion(model: Served, token: str, misdeed: str, prompt: str, is_stream: bool) -> Request:
    """A request to the stand-in of an engine, which repeats the prompt."""
    is_stream = misdeed == "break" or (is_stream and misdeed != "flood")
    if misdeed:
        prompt = f"{token} {misdeed}" if is_stream else misdeed
    sent = json.dumps({"model": model.name, "prompt": prompt, "stream": is_stream})
    expected = json.dumps({"text": prompt.upper(), "body": sent})
    if is_stream:
        expected = "".join(f"data: {word}\n\n" for word in [*prompt.split(), "[DONE]"])
    return Request(model, token, sent.encode(), expected, misdeed, is_stream)
