"""What is around an envelope: a recording handler and a batch."""

from collections.abc import Callable
from typing import Any

import pytest

from marserve.backend.context import Context


class Recorder:
    """An entry point that stores its data and returns a function of them."""

    def __init__(self, answer: Callable[[Any], Any]) -> None:
        self.answer = answer
        self.seen: Any = None

    def __call__(self, data: Any, context: Context) -> Any:
        self.seen = data
        return self.answer(data)


@pytest.fixture
def ask(make_context, begin_batch):
    """Send rows through an envelope; return answers, the handler's data and the context."""

    def run(envelope, *rows, handler=lambda data: data, headers=None, context=None):
        context = begin_batch(
            context or make_context(modelVersion="2.1"), *(headers or [{}] * len(rows))
        )
        recorder = Recorder(handler)
        answers = envelope(recorder).handle(list(rows), context)
        return answers, recorder.seen, context

    return run
