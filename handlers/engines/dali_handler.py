"""What handlers have in common whose images NVIDIA's DALI prepares."""

from typing import Any

import numpy as np
import torch

from marserve.backend.context import Context
from marserve.handlers.base_handler import BaseHandler
from marserve.handlers.engines.dali_pipeline import get_dali_pipeline
from marserve.handlers.explanations import PixelAttributions
from marserve.handlers.refusals import UnusableInput
from marserve.handlers.timer import timed
from marserve.handlers.utils import value_of


class DALIHandler(PixelAttributions, BaseHandler):
    """A handler whose requests are image files, decoded by a DALI pipeline.

    Attributes:
        pipeline: The DALI pipeline.
    """

    def initialize(self, context: Context) -> None:
        """Load the model, and make the pipeline.

        Raises:
            ImportError: DALI is not installed.
            RuntimeError: The archive does not hold the pipeline's file.
            ValueError: The configuration lacks what the pipeline needs.
        """
        super().initialize(context)
        self.initialized = False
        self.pipeline = get_dali_pipeline(context)
        self.initialized = True

    def sample_input(self) -> Any:
        """Return an image file; see `BaseHandler.sample_input`."""
        # Here: DALI decodes without PIL, which need not be installed.
        from marserve.handlers.inputs.images import sample_image

        return sample_image()

    @timed
    def preprocess(self, data: Any) -> Any:
        """Make one tensor of the requests' images, shape ``(requests, channels, height, width)``.

        DALI decodes a batch at once: a file that it cannot decode fails the batch.

        Raises:
            RefusedInputs: There are requests that hold no file; it says which.
        """
        [images] = self.pipeline.run(source=self.each_usable(_file_of, data))
        dense = images.as_tensor()
        on_gpu = hasattr(dense, "__cuda_array_interface__")
        tensor = torch.as_tensor(dense if on_gpu else np.asarray(dense), device=self.device)
        return tensor.clone()  # the pipeline uses its memory again


def _file_of(row: Any) -> Any:
    value = value_of(row)
    if not isinstance(value, bytes | bytearray | memoryview) or not value:
        raise UnusableInput("The input is no image file.")
    return np.frombuffer(value, dtype=np.uint8)
