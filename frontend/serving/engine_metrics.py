"""The metrics that inference engines export, relayed by their workers for the page of metrics.

An engine's metrics have a colon in their names (``vllm:generation_tokens_total``). Others, about
its Python process, are left out. The labels ``registered_model``, ``model_version`` and
``worker_id`` are added.
"""

import asyncio
from collections.abc import Collection

from marserve.backend.protocol import Input, Predict, Reply
from marserve.frontend.serving.model_version import ModelVersion
from marserve.frontend.serving.registry import ModelRegistry
from marserve.frontend.telemetry.exposition import quote
from marserve.frontend.workers.connection import BatchAnswer
from marserve.frontend.workers.dispatch.batched import DispatchStrategy

# An engine that takes longer is left out.
_SECONDS = 1.0
_HEADERS = {"url_path": "metrics", "explain": "False"}


async def engine_metrics(registry: ModelRegistry, only: Collection[str] = ()) -> str:
    """Return the metrics of the engines of all ready workers; ``only`` of samples, if not empty."""
    relays = [
        (_labels(model, worker.worker_id), dispatch)
        for model in registry
        for worker in model.workers
        if (dispatch := worker.dispatch) is not None and dispatch.connection.is_relay
    ]
    if not relays:
        return ""
    pages = await asyncio.gather(*(_page(dispatch) for _, dispatch in relays))
    #: By name of the metric: the comments of the first engine, the samples of all.
    families: dict[str, tuple[list[str], list[str]]] = {}
    for (labels, _), page in zip(relays, pages, strict=True):
        _add(page, labels, frozenset(only), families)
    lines = [line for head, samples in families.values() if samples for line in (*head, *samples)]
    return "".join(f"{line}\n" for line in lines)


def _labels(model: ModelVersion, worker_id: int) -> str:
    name, version = quote(model.name), quote(model.version)
    return f'registered_model="{name}",model_version="{version}",worker_id="{worker_id}"'


async def _page(dispatch: DispatchStrategy) -> str:
    answered: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def on_reply(reply: BatchAnswer) -> None:
        if not answered.done() and isinstance(reply, Reply):
            is_page = bool(reply.predictions) and reply.predictions[0].status == 200
            body = bytes(reply.predictions[0].body) if is_page else b""
            answered.set_result(body.decode(errors="replace"))

    batch = Predict([Input("metrics", dict(_HEADERS), [])])
    dispatch.connection.predict(batch, dispatch.timeout, on_reply)
    await asyncio.wait({answered}, timeout=_SECONDS)
    return answered.result() if answered.done() else ""


def _add(
    page: str,
    labels: str,
    only: frozenset[str],
    families: dict[str, tuple[list[str], list[str]]],
) -> None:
    known = frozenset(families)
    family = ""
    for line in page.splitlines():
        if line.startswith("#"):
            family = line.split(" ", 3)[2] if line.count(" ") >= 2 else ""
            if ":" in family:
                head, _ = families.setdefault(family, ([], []))
                if family not in known:
                    head.append(line)
            continue
        name, brace, rest = line.partition("{")
        if not brace:
            name, _, rest = line.partition(" ")
        if ":" in family and (not only or name in only):
            inside = f"{labels},{rest}" if brace else f"{labels}}} {rest}"
            families[family][1].append(f"{name}{{{inside}")
