"""How much each word of a text adds to the score of a class: integrated gradients.

Captum attributes to a layer's output, which for an `EmbeddingBag` is one vector for the whole text,
whatever its words. Here the embedding of each word is the variable: it grows from nothing to its
full length, the gradients of the score on the way are averaged, and what a word adds is its
embedding times that average. The words' shares then sum up to what the text changes.
"""

from typing import Any

import torch
from torch.nn.functional import embedding_bag

STEPS = 15
"""Points on the way from no text to the text; TorchServe takes as many for images."""


def attribute_to_tokens(model: Any, tokens: Any, target: int) -> Any:
    """Attribute the score of a class to the tokens of one text.

    Args:
        model: Called as ``model(tokens, offsets)``; its layer ``embedding`` is looked into.
        tokens: Indices of shape ``(tokens,)``.
        target: The class.

    Returns:
        Shape ``(tokens, embedding)``.
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
