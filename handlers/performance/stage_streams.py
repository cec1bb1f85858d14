"""A batch's way to a CUDA device and back, beside what the device computes for other batches.

Work of one stream is done in order, and so a copy of the next batch, or of the last answers, would
wait behind the model. Where stages overlap each of them has a stream of its own, and a batch that
goes from stage to stage has the next stream wait for the one before by an event. The host waits for
nothing but the answers.

Memory belongs to the stream it was allocated on, and may be handed out there again when the last
tensor over it is gone, though another stream still reads it. So a batch keeps what its stages made
until its answers have been read (`Passage`): by then everything they depend on has been computed.
What a batch that failed may still be reading is of no interest.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def to_device(batch: torch.Tensor, device: Any) -> torch.Tensor:
    """Copy a tensor to where the model is, to a CUDA device without waiting for it.

    Only from pinned memory can the device fetch it by itself. (The allocator of that memory keeps
    it until the copy is done.)
    """
    if getattr(device, "type", None) != "cuda" or batch.is_cuda:
        return batch.to(device)
    return batch.pin_memory().to(device, non_blocking=True)


class StageStreams:
    """The streams of a handler's stages, all on one device.

    Args:
        device: A CUDA device.
    """

    def __init__(self, device: Any) -> None:
        self.device = device
        self.before: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's
        self.after: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's

    def label(self) -> "StageLabels":
        """What opens the context of each stage of one batch."""
        return StageLabels(self)


class StageLabels:
    """Puts the stages of one batch on their streams; see `passage.StageLabel`."""

    def __init__(self, streams: StageStreams) -> None:
        self._streams = streams
        self._done: Any = None

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Run a stage behind the one before: on its own stream; the model on the usual one."""
        streams = self._streams
        # The device is a thread's own, too.
        with torch.cuda.device(streams.device), torch.cuda.stream(self._stream_of(stage)):
            current = torch.cuda.current_stream(streams.device)
            if self._done is not None:
                current.wait_event(self._done)
            yield
            self._done = current.record_event()
            if stage == "postprocess":  # answers are read without any stream to wait for it
                self._done.synchronize()

    def _stream_of(self, stage: str) -> Any:
        streams = self._streams
        if stage == "preprocess":
            return streams.before
        if stage == "postprocess":
            return streams.after
        return torch.cuda.default_stream(streams.device)
