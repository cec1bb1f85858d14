import copy
import pickle

import pytest

from marserve.backend.context import Context, RequestProcessor
from marserve.backend.errors import PredictionException
from marserve.backend.metrics import MetricsStore


def make_context(**overrides) -> Context:
    arguments = {
        "model_name": "kitten",
        "model_dir": "/models/kitten",
        "manifest": {"model": {"modelName": "kitten"}},
        "batch_size": 4,
        "gpu": None,
        "mms_version": "1.0",
    }
    return Context(**{**arguments, **overrides})


@pytest.fixture
def context():
    context = make_context(metrics=MetricsStore())
    context.request_ids = {0: "a", 1: "b", 2: "c"}
    context.request_processor = [
        RequestProcessor({"X-Who": who, "data": {"content-type": "text/plain"}}) for who in "abc"
    ]
    return context


def test_system_properties_have_torchserves_names():
    context = make_context(gpu=1, limit_max_image_pixels=False)

    assert context.system_properties == {
        "model_dir": "/models/kitten",
        "gpu_id": 1,
        "batch_size": 4,
        "server_name": "MMS",
        "server_version": "1.0",
        "limit_max_image_pixels": False,
    }


def test_can_be_made_by_position_as_in_users_tests():
    context = Context("kitten", ".", None, 1, 0, "1.0", True, None, {"handler": {"n": 1}})

    assert context.model_yaml_config == {"handler": {"n": 1}}
    assert context.manifest is None


def test_an_absent_yaml_is_an_empty_mapping():
    assert make_context().model_yaml_config == {}


def test_before_the_first_batch_there_are_no_requests():
    context = make_context()

    context.set_response_status(500, "lost")
    context.set_all_response_status(500, "lost")

    assert context.request_ids is None
    assert context.request_processor is None
    assert context.get_request_id() is None
    assert context.get_request_header(0, "explain") is None
    assert context.get_sequence_id(0) is None
    assert context.cl_socket is None
    assert context.stopping_criteria is None


def test_requests_are_distinguished_by_index(context):
    assert [context.get_request_id(i) for i in range(4)] == ["a", "b", "c", None]
    assert context.get_request_header(1, "X-Who") == "b"
    assert context.get_request_header(1, "data") == {"content-type": "text/plain"}
    assert context.get_all_request_header(2)["X-Who"] == "c"


def test_request_headers_are_case_sensitive(context):
    assert context.get_request_header(0, "x-who") is None


def test_a_status_belongs_to_one_request(context):
    context.set_response_status(418, "Teapot", 1)

    assert [context.get_response_status(i) for i in range(3)] == [
        (200, None),
        (418, "Teapot"),
        (200, None),
    ]


def test_a_status_for_all(context):
    context.set_all_response_status(503, "Busy")

    assert {context.get_response_status(i) for i in range(3)} == {(503, "Busy")}


def test_response_headers_and_content_type(context):
    context.set_response_header(0, "X-Model", "1")
    context.set_response_content_type(0, "text/plain")
    context.set_response_content_type(0, "image/png")

    assert context.get_response_headers(0) == {"X-Model": "1", "content-type": "image/png"}
    assert context.get_response_content_type(0) == "image/png"
    assert context.get_response_content_type(1) is None


@pytest.mark.parametrize("value", [1, None, b"1", ["1"]])
def test_a_response_header_that_is_no_text_is_refused_where_it_is_set(context, value):
    with pytest.raises(TypeError, match=r"'X-Count'.*str\(\)"):
        context.set_response_header(0, "X-Count", value)


def test_an_index_beyond_the_batch_says_so(context):
    with pytest.raises(IndexError, match="No request 3 in a batch of 3"):
        context.set_response_status(400, "", 3)


def test_sequence_header_names_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("TS_REQUEST_SEQUENCE_ID", "X-Sequence")
    context = make_context()
    context.request_processor = [RequestProcessor({"X-Sequence": "s1"})]

    assert context.get_sequence_id(0) == "s1"
    assert context.header_key_sequence_start == "ts_request_sequence_start"
    assert context.header_key_sequence_end == "ts_request_sequence_end"


def test_equal_when_all_attributes_are():
    each, other = make_context(), make_context()
    assert each == other
    other.cache = {}  # handlers hang things on it
    assert each != other
    assert each != "kitten"
    with pytest.raises(TypeError, match="unhashable"):
        hash(each)


def test_metrics_learn_the_model_and_the_batch_from_the_context(context):
    context.metrics.add_counter("Seen", 1, idx=1)

    [row] = context.metrics.drain()
    assert row[4:] == [[["ModelName", "kitten"], ["Level", "Model"]], ["b"]]


def test_limited_to_some_requests_what_is_set_stays_with_them(context):
    with context.limited_to([0, 2]):
        assert context.request_ids == {0: "a", 1: "c"}
        assert context.get_request_header(1, "X-Who") == "c"
        context.set_response_status(202, "", 1)

    assert context.request_ids == {0: "a", 1: "b", 2: "c"}
    assert [context.get_response_status(i)[0] for i in range(3)] == [200, 200, 202]


def test_a_limit_ends_with_an_exception(context):
    with pytest.raises(KeyError), context.limited_to([1]):
        raise KeyError
    assert len(context.request_processor) == 3


def test_request_processor_takes_no_other_attributes():
    with pytest.raises(AttributeError):
        RequestProcessor({}).cache = {}


def test_prediction_exception_keeps_its_code():
    error = pickle.loads(pickle.dumps(PredictionException("no such city", 404)))

    assert (error.message, error.error_code, str(error)) == (
        "no such city",
        404,
        "no such city : 404",
    )
    assert PredictionException("broken").error_code == 500


def test_batches_that_overlap_have_requests_of_their_own():
    shared = make_context(metrics=MetricsStore())
    first, second = shared.for_batch(), shared.for_batch()
    for context, id_ in ((first, "a"), (second, "b")):
        context.request_ids = {0: id_}
        context.request_processor = [RequestProcessor({"id": id_})]
    for context in (first, second):
        context.metrics.add_counter("Seen", 1)
    assert [each.get_request_header(0, "id") for each in (first, second)] == ["a", "b"]
    assert [row[5] for row in shared.metrics.drain()] == [["a"], ["b"]]
    assert shared.request_ids is None
    assert shared.metrics.request_ids is None


def test_what_a_handler_hangs_on_the_context_is_there_for_every_batch():
    shared = make_context()
    first = shared.for_batch()
    first.counter = 1
    second = shared.for_batch()
    second.counter += 1
    assert (first.counter, first.model_name, first.metrics) == (2, "kitten", None)
    del first.counter
    assert not hasattr(second, "counter")
    assert isinstance(copy.deepcopy(second), Context)


class AnyMetrics:
    """Takes every call, as projects have it that run handlers by themselves."""

    def __getattr__(self, name):
        return lambda *args, **kwargs: None


class Refusing:
    def __setattr__(self, name, value):
        raise ValueError(name)


@pytest.mark.parametrize("metrics", [AnyMetrics(), Refusing(), object(), {}, "none"])
def test_metrics_may_be_anything_in_a_test_of_a_handler(metrics):
    context = make_context(metrics=metrics)
    context.request_ids = {0: "a"}
    assert context.metrics is metrics
    assert context.for_batch().metrics is metrics


def test_metrics_of_ones_own_learn_the_ids_of_a_batch():
    metrics = AnyMetrics()
    make_context(metrics=metrics).request_ids = {0: "a"}
    assert metrics.request_ids == {0: "a"}


def test_a_store_that_has_a_name_and_an_id_keeps_them():
    context = make_context(metrics=MetricsStore("some id", "their name"))
    context.metrics.add_counter("N", 1)
    [row] = context.metrics.drain()
    assert row[4:] == [[["ModelName", "their name"], ["Level", "Model"]], ["some id"]]


def test_torchserves_private_names_mean_the_public_ones(context):
    context._request_processor = [RequestProcessor({"X-Who": "me"})]
    assert context.get_request_header(0, "X-Who") == "me"
    assert context._request_processor is context.request_processor
    assert context._system_properties is context.system_properties


def test_torchserves_private_name_is_of_one_batch_where_several_overlap(context):
    batch = context.for_batch()
    batch._request_processor = [RequestProcessor({"X-Who": "me"})]
    assert batch.get_request_header(0, "X-Who") == "me"
    assert context.get_request_header(0, "X-Who") == "a"
