import asyncio
import contextlib
import logging
import os
import select
import subprocess
import sys
import threading

from marserve.frontend.workers.launchers.output import OutputLog


def test_a_grandchild_that_prints_without_end_does_not_hold_the_end_of_a_worker(run, caplog):
    reading, writing = os.pipe()
    over = threading.Event()

    def print_on():
        with contextlib.suppress(BrokenPipeError):
            while not over.is_set():
                os.write(writing, b"still here\n" * 1000)

    async def scenario():
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


def test_a_wake_up_without_data_does_not_kill_a_worker_at_its_next_line(caplog):
    code = "import os, sys; os.write(1, b'first\\n'); sys.stdin.read(); os.write(1, b'second\\n')"

    async def scenario(process, stdin):
        assert process.stdout is not None
        output = OutputLog(process.stdout, logging.INFO, "W-9000")
        select.select([process.stdout], [], [], 20.0)
        await asyncio.sleep(0)  # this goes on between the wake-up and what it calls
        assert os.read(process.stdout.fileno(), 100) == b"first\n"
        await asyncio.sleep(0)
        stdin.close()
        status = await asyncio.to_thread(process.wait)
        output.close()
        return status

    with (
        caplog.at_level(logging.INFO, "MODEL_LOG"),
        subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        ) as process,
    ):
        assert process.stdin is not None
        assert asyncio.run(scenario(process, process.stdin)) == 0
    assert caplog.messages == ["second"]
