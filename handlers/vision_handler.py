"""What handlers of images have in common: decoding, one request at a time, and explanations.

Batch-mates are strangers, so an input that is no image costs only its own request its answer (400).
How: `VisionHandler.preprocess` says which requests it refuses, and the batch is run again without
them. A subclass's own `preprocess` and `postprocess` thus always see a batch in which every request
is good, just as under TorchServe, and the context counts the requests of that batch. The price,
decoding the good ones twice, is paid only by a batch that holds a bad one.
"""

import functools
import importlib
import logging
from contextlib import nullcontext
from typing import Any

import torch
from PIL import Image

from marserve.backend.context import Context
from marserve.backend.errors import PredictionException
from marserve.handlers.base_handler import BaseHandler, StageLabel, value_of
from marserve.handlers.images import RefusedInputs, UnreadableImage, decode_image
from marserve.handlers.timer import timed

logger = logging.getLogger(__name__)


class VisionHandler(BaseHandler):
    """A handler whose requests are images.

    A request is an image file's bytes, the same in base64 as a str, or the pixels as nested lists
    of numbers, under ``data`` or ``body``.

    Attributes:
        image_processing: From a PIL image in RGB to a tensor; given by the subclass.
    """

    image_processing: Any

    def initialize(self, context: Context) -> None:
        """Load the model; lift PIL's limit on the size of images if the server says so."""
        super().initialize(context)
        if not context.system_properties.get("limit_max_image_pixels", True):
            Image.MAX_IMAGE_PIXELS = None

    @timed
    def preprocess(self, data: Any) -> Any:
        """Make one tensor of the requests' images, shape ``(requests, channels, height, width)``.

        Raises:
            RefusedInputs: There are requests without a readable image; it says which.
        """
        tensors: list[torch.Tensor] = []
        refused: dict[int, str] = {}
        for index, row in enumerate(data):
            try:
                tensors.append(self._tensor_of(value_of(row)))
            except UnreadableImage as error:  # noqa: PERF203 - each request fails alone
                refused[index] = str(error)
        if refused:
            raise RefusedInputs(refused)
        return torch.stack(tensors).to(self.device)

    def get_insights(self, tensor_data: Any, inputs: Any, target: Any = 0) -> Any:
        """Attribute the answers to the pixels: nested lists in the shape of ``tensor_data``."""
        del inputs
        return self.ig.attribute(tensor_data, target=target, n_steps=15).tolist()

    @functools.cached_property
    def ig(self) -> Any:
        """Captum's integrated gradients of the model; captum is needed for nothing else.

        Raises:
            PredictionException: 501, captum is not installed.
        """
        try:
            attribution = importlib.import_module("captum.attr")
        except ImportError as error:
            raise PredictionException(
                "Explanations need the package captum, which this server does not have", 501
            ) from error
        return attribution.IntegratedGradients(self.model)

    def _tensor_of(self, value: Any) -> Any:
        if isinstance(value, str | bytes | bytearray | memoryview):
            return self.image_processing(decode_image(value))
        if value is None:
            raise UnreadableImage("The request has neither data nor body.")
        try:
            return torch.as_tensor(value, dtype=torch.float32)
        except (TypeError, ValueError, RuntimeError) as error:
            raise UnreadableImage(f"The input is neither an image nor numbers: {error}") from error

    def _predict(self, data: Any, stage: StageLabel = nullcontext) -> Any:
        try:
            return super()._predict(data, stage)
        except RefusedInputs as refused:
            reasons = refused.reasons
        good = [index for index in range(len(data)) if index not in reasons]
        answers = self._predict_part(data, good, stage)
        if not isinstance(answers, list) or len(answers) != len(good):
            return answers  # whoever counts them reports it
        by_place = dict(zip(good, answers, strict=True))
        return [
            by_place[index] if index in by_place else self._refuse(index, reasons[index])
            for index in range(len(data))
        ]

    def _predict_part(self, data: Any, indices: list[int], stage: StageLabel) -> Any:
        if not indices:
            return []
        with self.context.limited_to(indices):
            return super()._predict([data[index] for index in indices], stage)

    def _refuse(self, index: int, reason: str) -> dict[str, Any]:
        logger.warning("Request %s is refused: %s", self.context.get_request_id(index), reason)
        self.context.set_response_status(400, "Bad Request", index)
        self.context.set_response_content_type(index, "application/json")
        return {"code": 400, "type": "BadRequestException", "message": reason}
