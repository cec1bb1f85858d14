"""Explanations: the pixels or words on which an answer depends."""

import functools
import importlib
from types import ModuleType
from typing import Any

import torch
from torch.nn.functional import embedding_bag

from marserve.backend.errors import PredictionException

STEPS = 15  # points of the integral from no input to the input, as in TorchServe


class PixelAttributions:
    """A mixin for handlers whose `model` takes a tensor of images."""

    model: Any

    def get_insights(self, tensor_data: Any, inputs: Any, target: Any = 0) -> Any:
        """Return attributions to pixels: nested lists in the shape of ``tensor_data``."""
        del inputs
        return self.ig.attribute(tensor_data, target=target, n_steps=STEPS).tolist()

    @functools.cached_property
    def ig(self) -> Any:
        """Captum's integrated gradients of the model."""
        return captum_attribution().IntegratedGradients(self.model)


def attribute_to_tokens(model: Any, tokens: Any, target: int) -> Any:
    """Return the integrated gradients of a class's score by token, shape ``(tokens, embedding)``.

    Captum attributes to a layer's output, which for an `EmbeddingBag` is one vector for the whole
    text. Here the embeddings of the tokens are the variables: the gradients of the score are
    averaged while the embeddings grow from zero to full length.
    """
    layer = model.embedding
    offsets = torch.zeros(1, dtype=torch.int64, device=tokens.device)
    full = layer.weight.detach()[tokens]
    total = torch.zeros_like(full)
    for step in range(STEPS):
        rows = (full * ((step + 0.5) / STEPS)).requires_grad_()
        with layer.register_forward_hook(_replacing(layer, rows, offsets)), torch.enable_grad():
            score = model(tokens, offsets)[0, target]
            (gradient,) = torch.autograd.grad(score, rows)
        total += gradient
    return full * total / STEPS


def _replacing(layer: Any, rows: Any, offsets: Any) -> Any:
    """Return a hook that replaces the layer's result by these embeddings."""

    def bag(*_: Any) -> Any:
        indices = torch.arange(len(rows), device=rows.device)
        return embedding_bag(indices, rows, offsets, mode=layer.mode)

    return bag if isinstance(layer, torch.nn.EmbeddingBag) else lambda *_: rows


def captum_attribution() -> ModuleType:
    """Return the module ``captum.attr``; PredictionException 501 if captum is not installed."""
    try:
        return importlib.import_module("captum.attr")
    except ImportError as error:
        reason = "Explanations need the package captum, which this server does not have"
        raise PredictionException(reason, 501) from error
