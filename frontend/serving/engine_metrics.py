"""The metrics that inference engines export, relayed by their workers for the page of metrics.

An engine's metrics have a colon in their names (``vllm:generation_tokens_total``). Others, about
its Python process, are left out. The labels ``registered_model``, ``model_version`` and
``worker_id`` are added. Comments are left out: those of two engines may differ.
"""

import asyncio
import re
from collections.abc import Collection, Iterable
from typing import NamedTuple

from marserve.backend.protocol import ENGINE_METRICS, Input, Predict, Reply
from marserve.frontend.aio.long_work import Steps
from marserve.frontend.serving.model_version import ModelVersion
from marserve.frontend.serving.registry import ModelRegistry
from marserve.frontend.telemetry.exposition import quote
from marserve.frontend.workers.connection import WorkerConnection

# An engine that takes longer is left out.
_SECONDS = 1.0
_MAX_LINE = 1 << 14  # longer ones are left out
_LABELS = ("registered_model", "model_version", "worker_id")
# A line with a sample: the name, the labels and the value. A moment that may follow is left out.
_SAMPLE = re.compile(
    r'(\w*:[\w:]*)(?:\{((?:\w+="(?:[^"\\\n]|\\.)*",?)*)\})? ([-+.\da-zA-Z]+)(?: -?\d+)?', re.ASCII
)


class EnginePage(NamedTuple):
    """The metrics of an engine, and the labels to add."""

    labels: str
    text: str


async def engine_pages(registry: ModelRegistry) -> list[EnginePage]:
    """Return the metrics of the engines of all ready workers."""
    relays = [
        (_labels(model, worker.worker_id), dispatch.connection)
        for model in registry
        for worker in model.workers
        if (dispatch := worker.dispatch) is not None and dispatch.connection.is_relay
    ]
    texts = await asyncio.gather(*(_page(connection) for _, connection in relays))
    return [EnginePage(labels, text) for (labels, _), text in zip(relays, texts, strict=True)]


def engine_lines(pages: Iterable[EnginePage], only: Collection[str] = ()) -> Steps[list[str]]:
    """Return the samples of engines with their labels; ``only`` of samples, if not empty."""
    found = list[str]()
    for labels, text in pages:
        yield len(text)
        start = 0
        while start < len(text):
            end = text.find("\n", start)
            end = len(text) if end < 0 else end
            is_long = end - start > _MAX_LINE
            if line := "" if is_long else _relabelled(text[start:end], labels, only):
                found.append(line)
            yield len(line)
            start = end + 1
    return found


def _labels(model: ModelVersion, worker_id: int) -> str:
    values = (model.name, model.version, str(worker_id))
    return ",".join(f'{name}="{quote(value)}"' for name, value in zip(_LABELS, values, strict=True))


async def _page(connection: WorkerConnection) -> str:
    answered: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
    request = Predict([Input(ENGINE_METRICS, {}, [])])
    connection.probe(request, answered.set_result)
    await asyncio.wait({answered}, timeout=_SECONDS)
    if not answered.done():
        connection.cancel(request.number)
        return ""
    predictions = answered.result().predictions
    if not predictions or predictions[0].status != 200:
        return ""
    return bytes(predictions[0].body).decode(errors="replace")


def _relabelled(line: str, labels: str, only: Collection[str]) -> str:
    """Return a line with these labels in front; empty for what is no sample or not wanted."""
    sample = _SAMPLE.fullmatch(line)
    if sample is None or (only and sample[1] not in only):
        return ""
    name, inside, value = sample.groups(default="")
    try:
        float(value)
    except ValueError:
        return ""
    if any(f"{label}=" in inside for label in _LABELS):
        return ""
    return f"{name}{{{','.join(filter(None, (labels, inside.rstrip(','))))}}} {value}\n"
