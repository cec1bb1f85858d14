"""The base of handlers of language models.

They are coroutines (``asyncCommunication: true``): the worker calls them with single requests, many
at a time on one event loop, and the engine forms batches.
"""

import json
import time
from typing import Any

from marserve.backend.context import Context
from marserve.backend.errors import PredictionException
from marserve.handlers.base_handler import BaseHandler
from marserve.handlers.performance.stage_run import report_time
from marserve.handlers.torchserve_api.predict_response import is_first_rank
from marserve.handlers.utils import value_of


class LLMHandler(BaseHandler):
    """A handler whose stages are coroutines; subclasses define `inference`."""

    model_dir = ""  # of the archive

    def read_settings(self, context: Context) -> dict[str, Any]:
        """Set the common attributes; return the section ``handler`` of model-config.yaml."""
        self.context = context
        self.model_dir = str(context.system_properties["model_dir"])
        self.model_yaml_config = context.model_yaml_config or {}
        settings: dict[str, Any] = self.model_yaml_config.get("handler") or {}
        return settings

    async def handle(self, data: Any, context: Context) -> Any:
        """Return a list with the answer to one request, or with its last piece."""
        started = time.perf_counter()
        inputs = await self.preprocess(data, context)
        outputs = await self.postprocess(await self.inference(inputs, context))
        report_time(context, time.perf_counter() - started)
        return outputs

    async def preprocess(self, data: Any, context: Context | None = None) -> Any:
        """Return the content of the only request, with JSON parsed."""
        del context
        return parsed_json(only_value(self, data))

    async def inference(self, data: Any, context: Context) -> Any:
        """Return a list with the answer to the result of `preprocess`."""
        raise NotImplementedError

    async def postprocess(self, outputs: Any) -> Any:
        """Return the answer unchanged."""
        return outputs


def only_value(handler: LLMHandler, data: Any) -> Any:
    """Return the content of the only request, or raise PredictionException 400."""
    if len(data) != 1:
        raise PredictionException(
            f"{type(handler).__name__} takes one request at a time: set batchSize to 1 and "
            "asyncCommunication to true",
            400,
        )
    return value_of(data[0])


async def send_piece(piece: str | bytes, context: Context) -> None:
    """Send a piece of a request's answer, from rank 0, and wait if many are unread."""
    if is_first_rank():
        context.send_intermediate([piece], context.request_ids, "Result", 200)
        await context.drain()


def parsed_json(value: Any) -> Any:
    """Parse a body that is text, or PredictionException 400; return others unchanged."""
    if not isinstance(value, str | bytes | bytearray | memoryview) or not value:
        return value
    try:
        return json.loads(bytes(value) if isinstance(value, memoryview) else value)
    except (ValueError, RecursionError) as error:
        raise PredictionException(f"The request is not JSON: {error}", 400) from error
