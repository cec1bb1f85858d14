"""Text of a batch, piece by piece, while transformers generates it."""

from collections.abc import Iterator
from typing import Any

from marserve.handlers.engines.optional import need


class TextIteratorStreamerBatch:
    """A streamer for ``model.generate(streamer=…)``, to be read in another thread.

    Iterating gives a list with ``{"text": piece}`` for each element of the batch, and ends when
    any of them is at its end.

    Args:
        tokenizer: The model's tokenizer.
        batch_size: Elements of the batch.
        skip_prompt: Leave the prompt out.
        timeout: Seconds to wait for the next piece; None waits for ever.
        **decode_kwargs: Passed on to the tokenizer's ``decode``.

    Raises:
        ImportError: transformers is not installed.
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
        """Take the batch's next tokens, shape ``(batch,)`` or, the prompt, ``(batch, tokens)``.

        Raises:
            ValueError: The batch is of another size.
        """
        if value.shape[0] != self.batch_size:
            raise ValueError(
                f"The streamer was made for a batch of {self.batch_size}, "
                f"not for tokens of shape {tuple(value.shape)}"
            )
        for streamer, tokens in zip(self.streamers, value.split(1), strict=True):
            streamer.put(tokens)

    def end(self) -> None:
        """Say that generation is over."""
        for streamer in self.streamers:
            streamer.end()

    def __iter__(self) -> Iterator[list[dict[str, str]]]:
        return self

    def __next__(self) -> list[dict[str, str]]:
        return [{"text": next(streamer)} for streamer in self.streamers]
