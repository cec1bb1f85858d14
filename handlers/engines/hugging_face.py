"""Models of Hugging Face: downloads, and streams of generated text."""

from collections.abc import Iterator
from typing import Any

from marserve.handlers.engines.optional import need

_FILES = ["*.json", "*.pt", "*.bin", "*.txt", "*.model", "*.pth", "*.safetensors", "original/*"]


def download_model(
    model_id: str = "meta-llama/Meta-Llama-3.1-8B-Instruct",
    revision: str = "main",
    model_path: str = ".cache",
    use_auth_token: bool | str = True,
) -> str:
    """Download a model's weights and tokenizer; return the directory of this revision.

    ``model_path`` is the directory for the downloads of all models. The token True is the one that
    ``huggingface-cli login`` saved.
    """
    hub = need("huggingface_hub", "huggingface_hub", "download_model")
    return str(
        hub.snapshot_download(
            repo_id=model_id,
            revision=revision,
            allow_patterns=_FILES,
            cache_dir=model_path,
            token=use_auth_token,
        )
    )


class TextIteratorStreamerBatch:
    """A streamer for ``model.generate(streamer=…)``, which another thread reads.

    An item is a list with ``{"text": piece}`` for each element of the batch; the iteration ends
    with the first element that ends. ``timeout`` is in seconds for each piece; None: unlimited.
    ``decode_kwargs`` are arguments of the tokenizer's ``decode``.
    """

    def __init__(
        self,
        tokenizer: Any,
        batch_size: int,
        skip_prompt: bool = False,
        timeout: float | None = None,
        **decode_kwargs: Any,
    ) -> None:
        transformers = need("transformers", "transformers", type(self).__name__)
        self.batch_size = batch_size
        self.streamers = [
            transformers.TextIteratorStreamer(tokenizer, skip_prompt, timeout, **decode_kwargs)
            for _ in range(batch_size)
        ]

    def put(self, value: Any) -> None:
        """Add the next tokens, shape ``(batch,)``, or the prompt, shape ``(batch, tokens)``."""
        if value.shape[0] != self.batch_size:
            raise ValueError(
                f"The streamer was made for a batch of {self.batch_size}, "
                f"not for tokens of shape {tuple(value.shape)}"
            )
        for streamer, tokens in zip(self.streamers, value.split(1), strict=True):
            streamer.put(tokens)

    def end(self) -> None:
        """End the streams."""
        for streamer in self.streamers:
            streamer.end()

    def __iter__(self) -> Iterator[list[dict[str, str]]]:
        return self

    def __next__(self) -> list[dict[str, str]]:
        return [{"text": next(streamer)} for streamer in self.streamers]
