"""The metrics that inference engines export, relayed by their workers for the page of metrics.

An engine's metrics have a colon in their names (``vllm:generation_tokens_total``). Others, about
its Python process, are left out. The labels ``registered_model``, ``model_version`` and
``worker_id`` are added.
"""

import asyncio
from collections.abc import Collection, Iterator

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
    samples: dict[str, list[str]] = {}  # by the comments of their metric
    for (labels, _), page in zip(relays, pages, strict=True):
        for comments, sample in _samples(page):
            name, brace, rest = sample.partition("{")
            if not brace:
                name, _, rest = sample.partition(" ")
            if ":" in name and (not only or name in only):
                rest = f",{rest}" if brace else f"}} {rest}"
                samples.setdefault(comments, []).append(f"{name}{{{labels}{rest}\n")
    return "".join(comments + "".join(lines) for comments, lines in samples.items())


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


def _samples(page: str) -> Iterator[tuple[str, str]]:
    """Yield the lines of samples, each with the lines of comments before its metric."""
    comments, is_sample = "", False
    for line in page.splitlines():
        if line.startswith("#"):
            comments = f"{line}\n" if is_sample else f"{comments}{line}\n"
        elif line:
            yield comments, line
        is_sample = not line.startswith("#")
