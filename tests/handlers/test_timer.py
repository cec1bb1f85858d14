import pytest

from marserve.backend.context import Context
from marserve.backend.metrics import MetricsStore
from marserve.handlers.timer import timed


class Handler:
    context: Context | None = None

    @timed
    def inference(self, data: int, *, plus: int = 0) -> int:
        """Add."""
        return data + plus


def make_context(config: dict) -> Context:
    return Context("kitten", ".", None, 1, None, "1.0", True, MetricsStore(), config)


def test_a_stage_is_timed_if_configured():
    handler = Handler()
    handler.context = make_context({"handler": {"profile": True}})

    assert handler.inference(1, plus=2) == 3

    [[kind, name, unit, milliseconds, *_]] = handler.context.metrics.drain()
    assert (kind, name, unit) == ("gauge", "ts_handler_inference", "Milliseconds")
    assert 0 <= milliseconds < 1000


@pytest.mark.parametrize("config", [{}, {"handler": None}, {"handler": {"profile": False}}])
def test_a_stage_is_not_timed_otherwise(config):
    handler = Handler()
    handler.context = make_context(config)
    assert handler.inference(1) == 1
    assert handler.context.metrics.drain() == []


def test_a_stage_without_a_context_is_not_timed():
    assert Handler().inference(1) == 1


def test_the_stage_keeps_its_name():
    assert Handler.inference.__doc__ == "Add."
