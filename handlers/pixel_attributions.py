"""Explanations of image models: which pixels an answer comes from."""

import functools
from typing import Any

from marserve.handlers.utils import captum_attribution


class PixelAttributions:
    """Mixed into handlers whose `model` takes a tensor of images."""

    model: Any

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
        return captum_attribution().IntegratedGradients(self.model)
