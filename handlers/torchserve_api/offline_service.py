"""``ts.service`` and ``ts.model_loader``: handlers without a server.

    service = ModelLoaderFactory.get_model_loader().load("kitten", folder, "handler.py")
    headers, rows, ids = Service.retrieve_data_for_inference(batch)
    service.context.request_ids, service.context.request_processor = ids, headers
    answers = service._entry_point(rows, service.context)

The folder must be on ``sys.path``, as under TorchServe. The service of our workers is
`marserve.backend.service`.
"""

import abc
import logging
import time
import uuid
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from marserve.backend.context import Context, RequestProcessor
from marserve.backend.errors import PredictionException as PredictionException
from marserve.backend.errors import failure_of
from marserve.backend.loader import find_envelope, find_handler, wrap
from marserve.backend.manifest import Manifest
from marserve.backend.metrics import MetricsStore
from marserve.backend.metrics import emit_metrics as emit_metrics
from marserve.backend.service import EntryPoint
from marserve.handlers.torchserve_api.predict_response import create_predict_response
from marserve.handlers.utils import PREDICTION_METRIC, get_yaml_config

logger = logging.getLogger(__name__)


class Service:
    """A handler's ``handle(data, context)`` and its context; ``manifest`` is the parsed file."""

    def __init__(
        self,
        model_name: str,
        model_dir: str,
        manifest: Any,
        entry_point: EntryPoint,
        gpu: int | None,
        batch_size: int | None,
        limit_max_image_pixels: bool | None = True,
        metrics_cache: Any = None,
    ) -> None:
        model = manifest.get("model") or {} if isinstance(manifest, Mapping) else {}
        config_file = model.get("configFile")
        self._context = Context(
            model_name,
            model_dir,
            manifest,
            batch_size or 1,
            gpu,
            version("marserve"),
            bool(limit_max_image_pixels),
            MetricsStore(uuid.uuid4(), model_name) if metrics_cache is None else metrics_cache,
            get_yaml_config(Path(model_dir, config_file)) if config_file else {},
        )
        self._entry_point = entry_point

    @property
    def context(self) -> Context:
        """The context of all batches."""
        return self._context

    def set_cl_socket(self, cl_socket: Any) -> None:
        """Set ``context.cl_socket``."""
        self.context.cl_socket = cl_socket

    @staticmethod
    def retrieve_data_for_inference(
        batch: Iterable[Mapping[str, Any]] | None,
    ) -> tuple[list[RequestProcessor], list[dict[str, Any]], dict[int, str]]:
        """Return the context's requests, the handler's data and the request ids of a batch.

        A request is ``{"requestId": bytes, "parameters": [{"name": str, "value": any,
        "contentType": str}], "headers": [{"name": bytes, "value": bytes}]}``; headers are optional.
        """
        if batch is None:
            raise ValueError("Received invalid inputs")
        processors: list[RequestProcessor] = []
        rows: list[dict[str, Any]] = []
        ids: dict[int, str] = {}
        for index, request in enumerate(batch):
            parameters = request["parameters"]
            ids[index] = _text(request["requestId"])
            rows.append({each["name"]: each["value"] for each in parameters})
            headers: dict[str, Any] = {
                each["name"]: {"content-type": each["contentType"]} for each in parameters
            }
            for header in request.get("headers") or ():
                headers[_text(header["name"])] = _text(header["value"])
            processors.append(RequestProcessor(headers))
        return processors, rows, ids

    def predict(self, batch: Iterable[Mapping[str, Any]] | None) -> Any:
        """Run the handler over a batch and return the result of `create_predict_response`."""
        context = self.context
        processors, rows, ids = self.retrieve_data_for_inference(batch)
        context.request_ids, context.request_processor = ids, processors
        started = time.perf_counter()
        try:
            results = self._entry_point(rows, context)
        except Exception as error:  # foreign code
            logger.warning("Invoking custom service failed.", exc_info=True)
            code, message = failure_of(error)
            return create_predict_response(None, ids, message, code)
        if not isinstance(results, list):
            return create_predict_response(None, ids, "Invalid model predict output", 503)
        if len(results) != len(rows):
            message = "number of batch response mismatched"
            return create_predict_response(None, ids, message, 503)
        duration_ms = round((time.perf_counter() - started) * 1000, 2)
        context.metrics.add_time(PREDICTION_METRIC, duration_ms)
        return create_predict_response(results, ids, "Prediction success", 200, context)


class ModelLoader(abc.ABC):
    """The base class of loaders."""

    @abc.abstractmethod
    def load(self, *args: Any, **kwargs: Any) -> Any:
        """Load a handler."""


class TsModelLoader(ModelLoader):
    """Loads a handler as a worker does."""

    def load(
        self,
        model_name: str,
        model_dir: str,
        handler: str,
        gpu_id: int | None = None,
        batch_size: int | None = None,
        envelope: str | None = None,
        limit_max_image_pixels: bool | None = True,
        metrics_cache: Any = None,
    ) -> Service:
        """Import and initialise a handler; its exceptions are raised unchanged.

        ``handler`` is as in the manifest, ``envelope`` the name of a request envelope.
        """
        if metrics_cache is not None:
            metrics_cache.set_request_ids(str(uuid.uuid4()))
        manifest = Manifest.read(Path(model_dir))
        found = find_handler(handler)
        entry_point = found.entry_point
        if envelope is not None:
            entry_point = wrap(entry_point, find_envelope(envelope))
        service = Service(
            model_name,
            model_dir,
            None if manifest is None else manifest.raw,
            entry_point,
            gpu_id,
            batch_size,
            limit_max_image_pixels,
            metrics_cache,
        )
        found.initialize(service.context)
        return service


class ModelLoaderFactory:
    """Returns the loader."""

    @staticmethod
    def get_model_loader() -> TsModelLoader:
        """Return a loader."""
        return TsModelLoader()


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes | bytearray) else str(value)
