"""Explanations: which pixels, or which words, an answer comes from."""

import functools
import importlib
from types import ModuleType
from typing import Any

import torch
from torch.nn.functional import embedding_bag

from marserve.backend.errors import PredictionException

STEPS = 15
"""Points on the way from no input to the input; TorchServe takes as many."""


class PixelAttributions:
    """Mixed into handlers whose `model` takes a tensor of images."""

    model: Any

    def get_insights(self, tensor_data: Any, inputs: Any, target: Any = 0) -> Any:
        """Attribute the answers to the pixels: nested lists in the shape of ``tensor_data``."""
        del inputs
        return self.ig.attribute(tensor_data, target=target, n_steps=STEPS).tolist()

    @functools.cached_property
    def ig(self) -> Any:
        """Captum's integrated gradients of the model."""
        return captum_attribution().IntegratedGradients(self.model)


def attribute_to_tokens(model: Any, tokens: Any, target: int) -> Any:
    """Attribute the score of a class to the tokens of one text, by integrated gradients.

    Captum attributes to a layer's output, which for an `EmbeddingBag` is one vector for the whole
    text. Here the embedding of each token is the variable: it grows from nothing to its full
    length, the gradients of the score on the way are averaged, and what a token adds is its
    embedding times that average. The tokens' shares sum up to what the text changes.

    The model, called as ``model(tokens, offsets)``, has a layer ``embedding``. Tokens are indices
    of shape ``(tokens,)``, the result has the shape ``(tokens, embedding)``.
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
    """Make the hook that has the layer answer with these embeddings instead of its own."""

    def bag(*_: Any) -> Any:
        places = torch.arange(len(rows), device=rows.device)
        return embedding_bag(places, rows, offsets, mode=layer.mode)

    return bag if isinstance(layer, torch.nn.EmbeddingBag) else lambda *_: rows


def captum_attribution() -> ModuleType:
    """Return the module ``captum.attr``; nothing but explanations needs the package.

    Raises:
        PredictionException: 501, captum is not installed.
    """
    try:
        return importlib.import_module("captum.attr")
    except ImportError as error:
        raise PredictionException(
            "Explanations need the package captum, which this server does not have", 501
        ) from error
