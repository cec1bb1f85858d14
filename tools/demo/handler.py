"""The demo's handler. It needs numpy only, so its workers start without torch."""

from pathlib import Path
from typing import Any

import numpy as np

_BEST = 5


class DigitsHandler:
    """Recognises digits of 8 x 8 grey values from 0 to 16, each sent as 8 lists of 8 numbers."""

    def initialize(self, context: Any) -> None:
        """Read the weights of the network."""
        with np.load(Path(context.system_properties["model_dir"], "digits.npz")) as weights:
            self._weights = list(weights.values())

    def handle(self, data: Any, context: Any) -> list[dict[str, Any]]:
        """Return the probabilities of the best digits of each image; an unusable one gets 400."""
        w0, w1, b0, b1 = self._weights
        images = [_pixels(row.get("body")) for row in data]
        answers: list[dict[str, Any]] = []
        for at, scores in enumerate(np.maximum(np.nan_to_num(images) @ w0 + b0, 0) @ w1 + b1):
            if np.isnan(images[at]).any():
                context.set_response_status(code=400, phrase="Bad Request", idx=at)
                answers.append({"error": "Send 8 lists of 8 numbers as application/json."})
                continue
            powers = np.exp(scores - scores.max())
            shares = powers / powers.sum()
            best = (-shares).argsort()[:_BEST]
            answers.append({str(digit): float(shares[digit]) for digit in best})
        return answers


def _pixels(body: Any) -> Any:
    """Return the network's input for a request: not-a-numbers if it is unusable."""
    try:
        pixels = np.asarray(body, dtype=np.float64).reshape(64) / 16
    except (TypeError, ValueError, OverflowError):
        return np.full(64, np.nan)
    return pixels if np.isfinite(pixels).all() else np.full(64, np.nan)
