"""What handlers have in common whose model DeepSpeed spreads over several processes."""

import os
from typing import Any

from marserve.backend.context import Context
from marserve.handlers.base_handler import BaseHandler


class BaseDeepSpeedHandler(BaseHandler):
    """A handler that runs in each of a worker's processes.

    A subclass loads its model in `initialize`, and hands it to
    ``ts.handler_utils.distributed.deepspeed.get_ds_engine``.
    """

    device: Any

    def initialize(self, context: Context) -> None:
        """Choose the device: the GPU of this process's rank."""
        del context
        self.device = int(os.environ.get("LOCAL_RANK", "0"))
