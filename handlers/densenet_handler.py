"""Requests and answers that are tensors, as ``torch.save`` writes them."""

import io
from typing import Any

import torch

from marserve.handlers.base_handler import BaseHandler
from marserve.handlers.refusals import UnusableInput
from marserve.handlers.timer import timed
from marserve.handlers.utils import value_of


class DenseNetHandler(BaseHandler):
    """Runs a model over tensors of one shape."""

    @timed
    def preprocess(self, data: Any) -> Any:
        """Return the requests' tensors as one, of shape ``(requests, …)``."""
        return torch.stack(self.each_usable(_tensor_of, data))

    @timed
    def postprocess(self, data: Any) -> list[Any]:
        """Return the rows of the output; that of a single request keeps the batch dimension."""
        return [data] if len(data) == 1 else [row.clone() for row in data]


def _tensor_of(row: Any) -> torch.Tensor:
    try:
        tensor = torch.load(io.BytesIO(value_of(row)), map_location="cpu", weights_only=True)
    except Exception as error:  # hostile bytes raise anything; only plain data is unpickled
        raise UnusableInput("The input is not a tensor saved by torch.save.") from error
    if not isinstance(tensor, torch.Tensor):
        raise UnusableInput(f"The input is a {type(tensor).__name__}, not a tensor.")
    return tensor
