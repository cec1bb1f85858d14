"""Tensors in, tensors out: requests and answers are what ``torch.save`` writes.

TorchServe's handler of this name answered a batch with one element, so that only batches of one
worked. Here every request gets its own row of the output; with one request, as there, the answer
keeps the batch's dimension.
"""

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
        """Make one tensor of the requests' tensors, shape ``(requests, …)``.

        Raises:
            RefusedInputs: There are requests that hold no tensor; it says which.
        """
        return torch.stack(self.each_usable(_tensor_of, data))

    @timed
    def postprocess(self, data: Any) -> list[Any]:
        """Deal the rows of the output out."""
        return [data] if len(data) == 1 else [row.clone() for row in data]


def _tensor_of(row: Any) -> torch.Tensor:
    try:
        tensor = torch.load(io.BytesIO(value_of(row)), map_location="cpu", weights_only=True)
    except Exception as error:  # hostile bytes fail in every way; only plain data is unpickled
        raise UnusableInput("The input is no tensor that torch.save wrote.") from error
    if not isinstance(tensor, torch.Tensor):
        raise UnusableInput(f"The input is a {type(tensor).__name__}, not a tensor.")
    return tensor
