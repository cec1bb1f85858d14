import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest

from marserve.frontend.workers.output import OutputLog


def test_a_grandchild_that_prints_without_end_does_not_hold_the_end_of_a_worker(
    run: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    reading, writing = os.pipe()
    over = threading.Event()

    def print_on() -> None:
        with contextlib.suppress(BrokenPipeError):
            while not over.is_set():
                os.write(writing, b"still here\n" * 1000)

    async def scenario() -> None:
        output = OutputLog(os.fdopen(reading, "rb", buffering=0), logging.INFO, "W-9000")
        printing = threading.Thread(target=print_on)
        printing.start()
        try:
            output.close()
        finally:
            over.set()
            await asyncio.to_thread(printing.join)
            os.close(writing)

    with caplog.at_level(logging.CRITICAL, "MODEL_LOG"):
        run(scenario())
