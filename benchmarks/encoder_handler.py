"""A small transformer encoder over the bytes of a text, with random weights and one thread.

Texts are padded to the longest of their batch and masked, as most served encoders do it. (PyTorch's
own encoder could skip padding by nested tensors; models that were exported, or do not come from
torch.nn, cannot.)
"""

from typing import Any

import torch

_WIDTH, _HEADS, _LAYERS, _MOST = 64, 2, 2, 2048


class EncoderHandler:
    """Texts in, one number for each out."""

    def initialize(self, _context: Any) -> None:
        """Build the model."""
        torch.set_num_threads(1)
        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(
            _WIDTH, _HEADS, 4 * _WIDTH, dropout=0.0, batch_first=True
        )
        self.embed = torch.nn.Embedding(256, _WIDTH)
        self.layers = torch.nn.TransformerEncoder(layer, _LAYERS, enable_nested_tensor=False).eval()

    def input_length(self, row: Any) -> int:
        """What a text is padded to, if it is the longest."""
        return len(self._text(row))

    def handle(self, data: Any, _context: Any) -> list[str]:
        """Answer a batch."""
        texts = [torch.tensor(list(self._text(row))) for row in data]
        lengths = torch.tensor([len(text) for text in texts])
        tokens = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
        is_padding = torch.arange(tokens.shape[1]) >= lengths.unsqueeze(1)
        with torch.inference_mode():
            encoded = self.layers(self.embed(tokens), src_key_padding_mask=is_padding)
            means = encoded[:, :, 0].masked_fill(is_padding, 0.0).sum(1) / lengths
        return [f"{value:.4f}" for value in means.tolist()]

    def _text(self, row: Any) -> bytes:
        body = row.get("data") or row.get("body")
        return (body.encode() if isinstance(body, str) else bytes(body))[:_MOST]
