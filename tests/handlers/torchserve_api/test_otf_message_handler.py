import pytest

from marserve.handlers.torchserve_api.otf_message_handler import send_intermediate_predict_response


def test_the_old_name_sends_and_warns(make_context, begin_batch) -> None:
    context, sent = begin_batch(make_context(), {}), []
    context.on_intermediate = lambda *what: sent.append(what)
    with pytest.warns(PendingDeprecationWarning, match=r"ts\.handler_utils\.utils"):
        send_intermediate_predict_response(["a"], context.request_ids, "Result", 200, context)
    assert sent == [(["a"], {0: "id-0"}, "Result", 200)]


def test_there_must_be_a_context() -> None:
    with (
        pytest.warns(PendingDeprecationWarning),
        pytest.raises(ValueError, match="needs the context"),
    ):
        send_intermediate_predict_response(["a"], {0: "id-0"}, "Result", 200)
