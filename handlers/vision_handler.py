"""Handlers of images: decoding, in threads, and explanations."""

import functools
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

import torch
from PIL import Image

from marserve.backend.context import Context
from marserve.handlers.base_handler import BaseHandler
from marserve.handlers.explanations import PixelAttributions
from marserve.handlers.inputs.images import SAMPLE_SIZE, decode_image, sample_image
from marserve.handlers.inputs.request_threads import RequestThreads, chosen_threads
from marserve.handlers.refusals import UnusableInput
from marserve.handlers.timer import timed
from marserve.handlers.utils import value_of, yaml_config_of


class VisionHandler(PixelAttributions, BaseHandler):
    """A handler whose requests are images.

    A request has the bytes of an image file, the same in base64 as a str, or pixels as nested lists
    of numbers. The subclass's ``image_processing`` makes a tensor of a PIL image, which has the
    mode of the file.
    """

    image_processing: Any
    sample_size = SAMPLE_SIZE  # width and height in pixels of `sample_input`

    def initialize(self, context: Context) -> None:
        """Load the model; remove PIL's limit of pixels if the server is configured so."""
        super().initialize(context)
        self.__count_threads(context)  # an invalid value fails the load
        if not context.system_properties.get("limit_max_image_pixels", True):
            Image.MAX_IMAGE_PIXELS = None

    def sample_input(self) -> Any:
        """Return two image files."""
        return sample_image(0, self.sample_size), sample_image(1, self.sample_size)

    @timed
    def preprocess(self, data: Any) -> Any:
        """Return the images as one tensor ``(requests, channels, height, width)``."""
        return torch.stack(self.each_usable(self._tensor_of, data)).to(self.device)

    @functools.cached_property
    def decode_threads(self) -> RequestThreads | None:
        """Threads that prepare the requests of a batch; None if the handler's thread does."""
        count = self.__count_threads(self.context)
        return RequestThreads(count) if count > 1 else None

    def __count_threads(self, context: Any) -> int:
        settings = yaml_config_of(context).get("handler")
        has_accelerator = self.map_location not in (None, "cpu")
        return chosen_threads(settings, has_accelerator=has_accelerator)

    def each_usable(self, prepare: Callable[[Any], Any], data: Iterable[Any]) -> list[Any]:
        """Prepare the requests as `BaseHandler.each_usable` does, in `decode_threads`."""
        rows, context = list(data), self.context
        if len(rows) < 2 or self.decode_threads is None:
            return super().each_usable(prepare, rows)

        def prepare_in_thread(row: Any) -> Any:
            self.context = context
            return prepare(row)

        return super().each_usable(Future.result, self.decode_threads.run(prepare_in_thread, rows))

    def _tensor_of(self, row: Any) -> Any:
        value = value_of(row)
        if isinstance(value, str | bytes | bytearray | memoryview):
            return self.image_processing(decode_image(value))
        if value is None:
            raise UnusableInput(
                "The request has neither data nor body: name the form field `data` or `body`."
            )
        try:
            tensor = torch.as_tensor(value, dtype=torch.float32)
        except (OverflowError, RuntimeError, TypeError, ValueError) as error:
            raise UnusableInput(f"The input is neither an image nor numbers: {error}") from error
        if not tensor.dim():
            raise UnusableInput("The input is a single number, not an image.")
        return tensor
