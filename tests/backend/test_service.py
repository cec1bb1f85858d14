"""A loaded model: batches in, predictions out, whatever the handler does."""

import asyncio
import json
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marserve.backend.batch_run import padded, repeats, without_padding
from marserve.backend.context import Context, RequestProcessor
from marserve.backend.errors import PredictionException, failure_of
from marserve.backend.metrics import MetricsStore
from marserve.backend.protocol import EndSequence, Input, Part, Piece, Predict, Prediction, Reply
from marserve.backend.service import Service


def make_context() -> Context:
    return Context("m", "/m", None, 4, None, "1", metrics=MetricsStore())


def make_service(entry_point: Callable[[Any, Context], Any], **options: Any) -> Service:
    return Service(entry_point, make_context(), **options)


def make_input(*parts: Part, id_: str = "id", **headers: str) -> Input:
    return Input(id_, headers, list(parts) or [Part("body", "", bytearray(b"x"))])


def predict(entry_point: Callable[[Any, Context], Any], count: int = 1, **options: Any) -> Reply:
    inputs = [make_input(id_=f"id-{i}") for i in range(count)]
    return make_service(entry_point, **options).predict(Predict(inputs))


def raising(error: BaseException) -> Callable[[Any, Context], Any]:
    def entry_point(_data: Any, _context: Context) -> Any:
        raise error

    return entry_point


def error_of(prediction: Prediction) -> tuple[int, str]:
    document = json.loads(bytes(prediction.body))
    assert document["code"] == prediction.status
    assert document["type"] == "InternalServerException"
    assert prediction.headers == {"content-type": "application/json"}
    return prediction.status, document["message"]


# -- what the handler gets -------------------------------------------------------------------------


def rows(*inputs: Input, **options: Any) -> list[dict[str, Any]]:
    seen: list[Any] = []
    make_service(lambda data, _: seen.extend(data) or data, **options).predict(Predict(inputs))
    return seen


@pytest.mark.parametrize(
    ("content_type", "body", "value"),
    [
        ("", b"\x00raw", bytearray(b"\x00raw")),
        ("application/octet-stream", b"x", bytearray(b"x")),
        ("application/json", b'{"a": [1]}', {"a": [1]}),
        ("application/json", b"null", None),
        ("application/json", b"{", bytearray(b"{")),
        ("application/json", b"\xff", bytearray(b"\xff")),
        ("application/json", b"[" * 100_000, bytearray(b"[" * 100_000)),
        ("Application/JSON", b"1", bytearray(b"1")),
        ("application/json5", b"1", bytearray(b"1")),
        ("text/plain", "grün".encode(), "grün"),
        ("text/csv; header=no", b"1,2", "1,2"),
        ("text/plain", b"\xff", bytearray(b"\xff")),
        ("Text/plain", b"x", bytearray(b"x")),
    ],
)
def test_a_part_is_decoded_by_its_content_type(content_type, body, value):
    [row] = rows(make_input(Part("body", content_type, bytearray(body))))
    assert row == {"body": value}
    assert type(row["body"]) is type(value)


@pytest.mark.parametrize("content_type", ["application/json", "text/plain", ""])
def test_decoding_can_be_switched_off(content_type):
    [row] = rows(make_input(Part("body", content_type, bytearray(b"1"))), decode_input=False)
    assert row == {"body": bytearray(b"1")}


def test_each_request_is_a_dict_of_its_parts_in_order():
    first = make_input(Part("a", "", bytearray(b"1")), Part("b", "application/json", b"2"))
    assert rows(first, make_input(Part("c", "text/plain", b"3")), Input("", {}, [])) == [
        {"a": bytearray(b"1"), "b": 2},
        {"c": "3"},
        {},
    ]


@pytest.mark.parametrize("name", ["request_processor", "_request_processor"])
def test_answers_are_what_was_set_to_processors_a_handler_put_in_place(name):
    def entry_point(data, context):
        setattr(context, name, [RequestProcessor({}) for _ in data])
        context.set_response_status(201, "Made", 1)
        context.set_response_header(1, "X-Mine", "yes")
        return [str(place) for place in range(len(data))]

    first, second = predict(entry_point, 2).predictions
    assert (first.status, second.status, second.headers) == (200, 201, {"X-Mine": "yes"})


@pytest.mark.parametrize("wrong", [None, [], [1, 2], "ab", [RequestProcessor({})] * 3])
def test_what_cannot_be_the_processors_of_a_batch_changes_no_answer(wrong):
    def entry_point(data, context):
        context.set_response_status(201, "Made", 1)
        context.request_processor = wrong
        return [str(place) for place in range(len(data))]

    assert [each.status for each in predict(entry_point, 2).predictions] == [200, 201]


def test_the_context_knows_ids_and_headers_of_the_batch_in_hand():
    seen = []

    def entry_point(data, context):
        seen.append(
            (
                context.request_ids,
                [context.get_request_header(i, "X-Trace") for i in range(len(data))],
                [context.get_request_header(i, "body") for i in range(len(data))],
            )
        )
        return data

    service = make_service(entry_point)
    part = Part("body", "text/plain", b"")
    service.predict(Predict([Input("a", {"X-Trace": "1"}, [part]), Input("b", {}, [part])]))
    service.predict(Predict([Input("c", {"X-Trace": "2", "body": "header wins"}, [part])]))
    described = {"content-type": "text/plain"}
    assert seen == [
        ({0: "a", 1: "b"}, ["1", None], [described, described]),
        ({0: "c"}, ["2"], ["header wins"]),
    ]


# -- results ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("result", "body"),
    [
        (b"\x00raw", b"\x00raw"),
        (bytearray(b"raw"), b"raw"),
        ("grün", "grün".encode()),
        ({"a": [1, "ä"]}, b'{\n  "a": [\n    1,\n    "\\u00e4"\n  ]\n}'),
        (None, b"null"),
        (float("nan"), b"NaN"),
        (True, b"true"),
    ],
)
def test_a_result_becomes_a_body(result, body):
    reply = predict(lambda *_: [result])
    assert (reply.code, reply.predictions) == (200, [Prediction(body)])


def circular() -> list[Any]:
    loop: list[Any] = []
    loop.append(loop)
    return loop


@pytest.mark.parametrize(
    ("unsendable", "why"),
    [
        (object(), "prediction is of type object."),
        ({1, 2}, "prediction is of type set."),
        (circular(), "prediction[0] contains itself."),
        ("\ud800", "prediction is text that UTF-8 cannot encode."),
        ({(1, 2): 3}, "prediction has a key that is of type tuple."),
    ],
)
def test_a_result_that_cannot_be_sent_fails_only_its_own_request(unsendable, why):
    reply = predict(lambda *_: ["a", unsendable, "c"], count=3)
    assert reply.code == 200
    good, bad, last = reply.predictions
    assert (good.body, last.body) == (b"a", b"c")
    assert error_of(bad) == (503, f"Unsupported model output data type. {why}")


def test_a_result_above_the_limit_fails_only_its_own_request():
    reply = predict(lambda *_: [b"12345", b"123456"], count=2, max_response_bytes=5)
    fits, too_long = reply.predictions
    assert fits.body == b"12345"
    status, message = error_of(too_long)
    assert status == 500
    assert "limit: 6" in message
    assert "max_response_size" in message


def test_status_phrase_and_headers_are_each_requests_own():
    def entry_point(data, context):
        context.set_response_status(418, "My Phrase", idx=1)
        context.set_response_header(1, "x-pot", "tea")
        context.set_response_content_type(0, "text/plain")
        return ["a", "b"]

    assert predict(entry_point, count=2).predictions == [
        Prediction(b"a", 200, "", {"content-type": "text/plain"}),
        Prediction(b"b", 418, "My Phrase", {"x-pot": "tea"}),
    ]


def test_what_one_batch_set_of_its_answers_does_not_stick_to_the_next():
    def entry_point(data, context):
        if data[0]["body"] == bytearray(b"x"):
            context.set_response_status(400)
            context.set_response_header(0, "a", "b")
        return ["done"]

    service = make_service(entry_point)
    service.predict(Predict([make_input()]))
    [prediction] = service.predict(Predict([make_input(Part("body", "", b"y"))])).predictions
    assert prediction == Prediction(b"done")


def test_a_status_that_is_no_number_fails_only_its_own_request():
    def entry_point(data, context):
        context.set_response_status("teapot", idx=1)
        return ["a", "b"]

    good, bad = predict(entry_point, count=2).predictions
    assert good == Prediction(b"a")
    assert isinstance(bad.status, int)
    assert bad.status >= 500


# -- failures --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (PredictionException("my words"), 500, "my words"),
        (PredictionException("teapot", 418), 418, "teapot"),
        (PredictionException("fine?", 299), 299, "fine?"),
        (PredictionException("too large", 413), 507, "too large"),
        (PredictionException(ValueError("inner"), 400), 400, "inner"),
        (MemoryError(), 507, "Out of resources"),
        (RuntimeError("CUDA out of memory"), 507, "Out of resources"),
        (ValueError("no CUDA device"), 507, "Out of resources"),
        (RuntimeError("HIP out of memory. Tried to allocate 2.00 GiB"), 507, "Out of resources"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 507, "Out of resources"),
        (ValueError("secret detail"), 503, "Prediction failed"),
        (KeyError("body"), 503, "Prediction failed"),
        (RecursionError(), 503, "Prediction failed"),
    ],
)
def test_an_exception_speaks_for_the_whole_batch(error, code, message):
    reply = predict(raising(error), count=2)
    assert (reply.code, reply.message, reply.predictions) == (code, message, [])
    assert failure_of(error) == (code, message)


class _Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def test_an_exception_that_cannot_be_reported_is_a_failure_like_others():
    assert predict(raising(_Mute())).code == 503


def test_an_exception_with_a_status_of_success_still_answers_the_batch():
    reply = predict(raising(PredictionException("fine", 200)))
    assert reply.code != 200 or len(reply.predictions) == 1


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_what_ends_a_process_ends_it(error):
    with pytest.raises(type(error)):
        predict(raising(error))


@pytest.mark.parametrize(
    "results",
    [None, ("a", "b"), "ab", {"a": 1}, b"ab", pytest.param(iter(["a", "b"]), id="iterator")],
    ids=repr,
)
def test_anything_but_a_list_fails_the_batch(results):
    reply = predict(lambda *_: results, count=2)
    assert (reply.code, reply.message) == (503, "Invalid model predict output")


@pytest.mark.parametrize("count", [0, 1, 3])
def test_another_number_of_results_fails_the_batch(count):
    reply = predict(lambda *_: ["x"] * count, count=2)
    assert (reply.code, reply.message) == (503, "number of batch response mismatched")


def test_the_traceback_goes_to_the_log_and_not_to_the_client(caplog):
    reply = predict(raising(ValueError("secret detail")))
    assert "secret detail" not in reply.message
    assert "secret detail" in caplog.text
    assert "Traceback" in caplog.text


# -- metrics ---------------------------------------------------------------------------------------


def names(reply: Reply) -> list[str]:
    return [row[1] for row in reply.metrics]


def test_what_a_handler_reports_travels_with_its_reply_once():
    def entry_point(data, context):
        context.metrics.add_counter("Cats", 2)
        return data

    service = make_service(entry_point)
    for _ in range(2):
        reply = service.predict(Predict([make_input()]))
        assert names(reply) == ["Cats"]
        assert reply.handler_ms > 0


def test_a_failed_batch_has_its_metrics_but_no_prediction_time():
    def entry_point(data, context):
        context.metrics.add_counter("Cats", 2)
        raise ValueError

    assert names(predict(entry_point)) == ["Cats"]


# -- answers in pieces -----------------------------------------------------------------------------


def stream(entry_point: Callable[[Any, Context], Any], count: int = 2) -> tuple[list[Piece], Reply]:
    """The pieces a handler sent, and the reply behind them."""
    pieces: list[Piece] = []
    inputs = [make_input(id_=f"id-{i}") for i in range(count)]
    return pieces, make_service(entry_point).predict(Predict(inputs), pieces.append)


def test_a_piece_has_a_prediction_for_each_request_and_says_that_more_follows():
    def handle(data, context):
        context.set_response_status(201, "so far", idx=1)
        context.send_intermediate(["a0", b"b0"], context.request_ids)
        return ["a1", "b1"]

    [piece], reply = stream(handle)
    assert piece.places == [0, 1]
    assert [bytes(each.body) for each in piece.predictions] == [b"a0", b"b0"]
    assert [each.status for each in piece.predictions] == [200, 201]
    assert [each.headers["ts_stream_next"] for each in piece.predictions] == ["true", "true"]
    assert [each.headers["ts_stream_next"] for each in reply.predictions] == ["false", "false"]


def test_a_piece_may_be_of_some_requests_only():
    def handle(data, context):
        with context.limited_to([1]):
            context.send_intermediate(["b0"], context.request_ids)
        return data

    [piece], _ = stream(handle)
    assert piece.places == [1]


@pytest.mark.parametrize(("results", "ids"), [(["a"], None), ("ab", None), (["a"], {0: "other"})])
def test_pieces_that_do_not_fit_are_the_authors_mistake(results, ids):
    def handle(data, context):
        with pytest.raises(ValueError, match=r"intermediate response|in the batch"):
            context.send_intermediate(results, ids)
        return data

    assert stream(handle)[0] == []


def test_an_intermediate_failure_tells_its_sentence():
    def handle(data, context):
        context.send_intermediate([], None, "no more tokens", 413)
        return data

    [piece], _ = stream(handle)
    assert (piece.code, piece.message) == (507, "no more tokens")


def test_stopping_criteria_say_which_answers_go_on():
    def handle(data, context):
        context.stopping_criteria = [
            lambda result: result == "a",
            lambda result: result == "a",
            lambda _: None,
            None,
            lambda _: 1 / 0,
        ]
        return ["a", "b", "c", "d", "e"]

    reply = make_service(handle).predict(Predict([make_input() for _ in range(5)]))
    headers = [each.headers.get("ts_stream_next") for each in reply.predictions]
    assert headers == ["false", "true", None, None, "false"]


def test_stopping_criteria_are_of_one_batch():
    def handle(data, context):
        if context.stopping_criteria is None and data[0]["body"] == b"first":
            context.stopping_criteria = [lambda _: False]
        return data

    service = make_service(lambda data, context: [str(handle(data, context))])
    first = service.predict(Predict([make_input(Part("body", "", bytearray(b"first")))]))
    second = service.predict(Predict([make_input()]))
    assert first.predictions[0].headers == {"ts_stream_next": "true"}
    assert second.predictions[0].headers == {}


# -- padding ---------------------------------------------------------------------------------------


def test_a_handler_sees_a_padded_batch_as_it_sees_any_other():
    seen = []

    def handle(data, context):
        data[3]["body"].extend(b"changed in place")
        seen.extend((data, context.request_ids))
        seen.append([context.get_request_header(i, "X-Trace") for i in range(len(data))])
        return ["a", "b", "p", "p"]

    first, last = make_input(id_="a"), Input("b", {"X-Trace": "1"}, [Part("body", "", b"y")])
    reply = make_service(handle).predict(Predict([first, last], run_as=4))
    assert reply.predictions == [Prediction(b"a"), Prediction(b"b")]
    data, ids, traces = seen
    assert [bytes(row["body"]) for row in data] == [b"x", b"y", b"y", b"ychanged in place"]
    assert (list(ids), ids[0], ids[1]) == ([0, 1, 2, 3], "a", "b")
    assert len(set(ids.values())) == 4
    assert traces == [None, "1", "1", "1"]


@pytest.mark.parametrize("run_as", [-1, 0, 1, 2])
def test_a_batch_that_is_large_enough_is_not_padded(run_as):
    service = make_service(lambda data, _: [str(len(data)) for _ in data])
    reply = service.predict(Predict([make_input(), make_input()], run_as=run_as))
    assert [each.body for each in reply.predictions] == [b"2", b"2"]


@pytest.mark.parametrize("count", [0, 2, 3, 5])
def test_the_number_of_results_is_that_of_the_padded_batch(count):
    service = make_service(lambda *_: ["x"] * count)
    reply = service.predict(Predict([make_input(), make_input()], run_as=4))
    assert (reply.code, reply.message) == (503, "number of batch response mismatched")


def test_pieces_about_the_padding_stay_here():
    pieces = []

    def handle(data, context):
        ids = context.request_ids or {}
        context.send_intermediate(["a", "p", "p"])
        context.send_intermediate(["p"], {0: ids[2]})
        context.send_intermediate(["p", "a2"], {1: ids[0], 0: ids[1]})
        return ["a3", "p", "p"]

    reply = make_service(handle).predict(Predict([make_input(id_="a")], run_as=3), pieces.append)
    assert [piece.places for piece in pieces] == [[0], [0]]
    assert [piece.predictions[0].body for piece in pieces] == [b"a", b"a2"]
    assert reply.predictions == [Prediction(b"a3", headers={"ts_stream_next": "false"})]


def test_an_answer_is_no_stream_for_pieces_about_the_padding_alone():
    def handle(data, context):
        context.send_intermediate(["p"], {0: (context.request_ids or {})[1]})
        return ["a", "p"]

    reply = make_service(handle).predict(Predict([make_input()], run_as=2))
    assert reply.predictions == [Prediction(b"a")]


def test_stopping_criteria_are_not_asked_about_the_padding():
    asked = []

    def handle(data, context):
        context.stopping_criteria = [asked.append] * 3
        return ["a", "p", "p"]

    make_service(handle).predict(Predict([make_input()], run_as=3))
    assert asked == ["a"]


@pytest.mark.parametrize("fails", [False, True])
def test_metrics_about_the_padding_stay_here(fails):
    def handle(data, context):
        context.metrics.add_counter("All", 1)
        for place in range(len(data)):
            context.metrics.add_counter(f"Row{place}", 1, place)
        context.metrics.add_error("Errors", 1)
        if fails:
            raise ValueError
        return data

    reply = make_service(handle).predict(
        Predict([make_input(id_="a"), make_input(id_="b")], run_as=4)
    )
    ids = {row[1]: row[5] for row in reply.metrics}
    assert ids == {"All": ["a", "b"], "Row0": ["a"], "Row1": ["b"], "Errors": []}


def answering(data: Any, context: Context) -> Any:
    """Says everything a handler can say, each time with the places it speaks of."""
    ids = context.request_ids or {}
    for place, row in enumerate(data):
        context.metrics.add_counter("Seen", place, place)
        context.set_response_header(place, "place", str(place))
        context.send_intermediate([f"piece {place}"], {0: ids[place]})
        row.clear()
    context.metrics.add_counter("Rows", 1)
    context.stopping_criteria = [lambda _: True for _ in data]
    return [f"last {place}" for place in range(len(data))]


@given(
    st.lists(st.text("abc-01", min_size=1), min_size=1, max_size=6, unique=True),
    st.integers(0, 12),
)
def test_whatever_the_size_clients_get_what_they_would_without_padding(ids, run_as):
    inputs = [make_input(id_=each) for each in ids]
    plain_pieces = []
    padded_pieces = []
    plain = make_service(answering).predict(Predict(inputs), plain_pieces.append)
    padded = make_service(answering).predict(Predict(inputs, run_as=run_as), padded_pieces.append)
    assert padded.handler_started > plain.handler_started > 0.0
    plain.handler_ms = padded.handler_ms = plain.handler_started = padded.handler_started = 0.0
    assert padded == plain
    assert padded_pieces == plain_pieces


# -- warm_ups ------------------------------------------------------------------------------------


def test_warming_up_leaves_no_trace_in_the_context():
    def handle(data, context):
        context.metrics.add_counter("Batch", 1)
        context.stopping_criteria = [lambda _: True]
        return data

    context = make_context()
    context.metrics.add_counter("Early", 1)
    fresh = {name: value for name, value in vars(context).items() if name != "metrics"}
    service = Service(handle, context)
    with service.without_traces():
        service.predict(Predict([make_input()]))
        context.metrics.add_counter("Between", 1)
    assert {name: value for name, value in vars(context).items() if name != "metrics"} == fresh
    assert context.metrics.request_ids is None
    assert names(service.predict(Predict([make_input()]))) == ["Early", "Batch"]


# -- coroutines ------------------------------------------------------------------------------------


def test_requests_of_a_coroutine_have_a_context_of_their_own():
    both = asyncio.Event()

    async def handle(data, context):
        context.seen.append(context.get_request_id())
        if context.get_request_id() == "b":
            both.set()
        await both.wait()
        return [f"{context.get_request_id()} {context.seen}"]

    async def scenario():
        context = make_context()
        context.seen = []
        service = Service(handle, context)
        return await asyncio.gather(
            *(service.predict_request(Predict([make_input(id_=each)])) for each in "ab")
        )

    replies = asyncio.run(scenario())
    assert [bytes(reply.predictions[0].body) for reply in replies] == [b"a ['a']", b"b ['b']"]


def test_a_context_with_what_cannot_be_copied_serves_coroutines():
    async def handle(data, context):
        return [context.lock is lock and context.model is model]

    context, lock, model = make_context(), threading.Lock(), object()
    context.lock, context.model = lock, model
    reply = asyncio.run(Service(handle, context).predict_request(Predict([make_input()])))
    assert bytes(reply.predictions[0].body) == b"true"


@pytest.mark.parametrize(
    ("entry_point", "code"),
    [(lambda data, _: data, 200), (raising(ValueError()), 503), (lambda *_: asyncio.sleep(0), 503)],
)
def test_one_request_beside_others_ends_as_it_would_alone(entry_point, code):
    service = make_service(entry_point)
    assert (
        asyncio.run(
            service.predict_request(Predict([make_input(Part("body", "text/plain", b"x"))]))
        ).code
        == code
    )


def test_the_last_input_is_repeated_up_to_the_size():
    first, last = make_input(id_="1"), make_input(Part("a", "", b"y"), Part("b", "", b"z"), id_="2")
    filled = padded([first, last], 5)
    assert filled[:2] == [first, last]
    assert [(each.headers, each.parts) for each in filled[2:]] == [(last.headers, last.parts)] * 3
    assert len({each.id for each in filled}) == 5


def test_a_repeat_has_bodies_of_its_own():
    original = make_input(id_="1")
    first, second = repeats(original, ["a", "b"])
    first.parts[0].body += b"changed"
    assert (original.parts[0].body, second.parts[0].body) == (b"x", b"x")
    assert (first.id, second.id) == ("a", "b")


def row(*ids: str) -> list[object]:
    return ["counter", "N", "Count", 1.0, [["Level", "Model"]], list(ids)]


@pytest.mark.parametrize("real", [[], ["1"], ["padding-0"], ["1", "2"]])
def test_ids_of_padding_are_taken_out_of_metrics(real):
    ours = [each.id for each in padded([make_input(id_="1")], 3)[1:]]
    mixed = [row(*real, *ours)] if real else []
    assert without_padding([row(*real), row(*ours), *mixed]) == [row(*real)] * (1 + len(mixed))


# -- the end of a sequence -------------------------------------------------------------------------


async def _coroutine(_sequence_id: str, _reason: str) -> None:
    pass


@pytest.mark.parametrize(
    ("hook", "code", "wants"),
    [
        (None, 200, False),
        (lambda sequence_id, reason: f"{sequence_id}{reason}", 200, True),
        (lambda _sequence_id: None, 503, True),
        (_coroutine, 503, True),  # nobody would wait for it
    ],
)
def test_a_handler_is_told_that_a_sequence_is_over(hook, code, wants):
    service = make_service(lambda data, _: data, owner=SimpleNamespace(end_sequence=hook))
    assert service.ends_sequences is wants
    assert service.end_sequence(EndSequence("a", "idle")).code == code


def test_a_coroutine_is_waited_for_where_the_handler_is_one():
    told = []

    async def hook(*what):
        await asyncio.sleep(0)
        told.append(what)

    service = make_service(lambda data, _: data, owner=SimpleNamespace(end_sequence=hook))
    reply = asyncio.run(service.end_sequence_async(EndSequence("a", "idle")))
    assert (reply.code, told) == (200, [("a", "idle")])
