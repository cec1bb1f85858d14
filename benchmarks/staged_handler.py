"""A model on an imagined device: every stage of a batch takes 20 ms and no processor.

It sleeps, so that on a small machine the server and its clients do not slow it down.
"""

import time
from typing import Any

from marserve.backend.context import Context
from marserve.handlers.base_handler import BaseHandler

STAGE_SECONDS = 0.020


class Staged(BaseHandler):
    """The handler."""

    def initialize(self, context: Context) -> None:
        """There is no model to load."""
        self.context = context

    def preprocess(self, data: Any) -> Any:
        """As if images were decoded."""
        _pass()
        return data

    def inference(self, data: Any, *_args: Any, **_kwargs: Any) -> Any:
        """As if a device was at work."""
        _pass()
        return data

    def postprocess(self, data: Any) -> Any:
        """As if answers were written."""
        _pass()
        return [b"done"] * len(data)


def _pass() -> None:
    until = time.perf_counter() + STAGE_SECONDS
    while (left := until - time.perf_counter()) > 0:
        time.sleep(left)
