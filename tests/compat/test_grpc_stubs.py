"""Clients with stubs that protoc made of upstream's own .proto files: every call they can make."""

import contextlib
import json

import grpc
import pytest
import upstream_stubs
from google.protobuf import empty_pb2
from google.protobuf.unknown_fields import UnknownFieldSet

pytestmark = pytest.mark.integration

SECONDS = 20.0
UNKNOWN_FIELD = b"\xba\x06\x05later"  # number 103, which no message of these files has
MODEL_NOT_FOUND = "org.pytorch.serve.archive.model.ModelNotFoundException"
PIECES = """
from ts.handler_utils.utils import send_intermediate_predict_response

def handle(data, context):
    if data is None:
        return None
    for number in range(2):
        pieces = [f"piece {number};"] * len(data)
        send_intermediate_predict_response(pieces, context.request_ids, "", 200, context)
    return ["last"] * len(data)
"""
SEQUENCES = (
    "minWorkers: 1\nmaxWorkers: 1\nbatchSize: 2\n"
    "sequenceBatching: true\nmaxNumSequence: 2\nmaxSequenceJobQueueSize: 3\n"
    "sequenceMaxIdleMSec: 60000\n"
)


@pytest.fixture(scope="module")
def stubs(request, tmp_path_factory):
    cache = getattr(request.config, "cache", None)  # absent with -p no:cacheprovider
    folder = cache.mkdir("upstream") if cache else tmp_path_factory.mktemp("upstream")
    try:
        return upstream_stubs.stubs(folder)
    except upstream_stubs.NotAvailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def server(start_compat_server, handlers):
    with start_compat_server(ts_open_inference_protocol="true") as server:
        assert server.register("probe.mar", initial_workers=1).status_code == 200
        folder = handlers.parents[1] / "compat" / "handlers"
        server.install(folder / "counter.py", "counter", SEQUENCES)
        server.install(folder / "tensors.py", "tensors")
        server.install(PIECES, "pieces")
        yield server


@pytest.fixture(scope="module")
def inference(stubs, server):
    with connected(server, "inference") as channel:
        yield stubs.inference_grpc.InferenceAPIsServiceStub(channel)


@pytest.fixture(scope="module")
def management(stubs, server):
    with connected(server, "management") as channel:
        yield stubs.management_grpc.ManagementAPIsServiceStub(channel)


@pytest.fixture(scope="module")
def open_inference(stubs, server):
    with connected(server, "inference") as channel:
        yield stubs.open_inference_grpc_grpc.GRPCInferenceServiceStub(channel)


@pytest.fixture
def predictions_request(stubs):
    """Makes a request with a field that is younger than the server."""

    def make(model, version="", sequence=None, **parts):
        request = stubs.inference.PredictionsRequest(
            model_name=model, model_version=version, input=parts, sequence_id=sequence
        )
        return type(request).FromString(request.SerializeToString() + UNKNOWN_FIELD)

    return make


def connected(server, listener):
    return grpc.insecure_channel(f"127.0.0.1:{server.grpc_ports[listener]}")


def assert_defined(message):
    """Nothing came that upstream's file does not define."""
    assert not len(UnknownFieldSet(message)), message


@contextlib.contextmanager
def refused(status, *lines):
    """The call ends with this status and this text."""
    with pytest.raises(grpc.RpcError) as raised:
        yield
    assert raised.value.code() is status
    assert raised.value.details() == "\n".join(lines)


def seen(answer):
    """What the handler "probe" was given."""
    assert_defined(answer)
    return json.loads(answer.prediction)


# inference.proto


def test_ping(inference):
    answer = inference.Ping(empty_pb2.Empty(), timeout=SECONDS)
    assert_defined(answer)
    assert json.loads(answer.health) == {"status": "Healthy"}


def test_predictions_give_each_part_to_the_handler_as_bytes(inference, predictions_request):
    picture = bytes(range(256))
    request = predictions_request("probe", data=picture, text=b"two words", empty=b"")
    parts = seen(inference.Predictions(request, timeout=SECONDS))["data"]
    assert parts == {
        "data": ["bytearray", picture.decode("latin-1")],
        "text": ["bytearray", "two words"],
        "empty": ["bytearray", ""],
    }


def test_predictions_of_a_named_version(inference, predictions_request):
    answer = inference.Predictions(predictions_request("probe", "1.0", data=b"x"), timeout=SECONDS)
    assert seen(answer)["data"] == {"data": ["bytearray", "x"]}


def test_predictions_of_no_model(inference, predictions_request):
    with refused(grpc.StatusCode.INTERNAL, "Model not found: nobody", MODEL_NOT_FOUND):
        inference.Predictions(predictions_request("nobody", data=b"x"), timeout=SECONDS)


def test_predictions_of_no_version(inference, predictions_request):
    with refused(
        grpc.StatusCode.INTERNAL,
        "Model version: 9.9 does not exist for model: probe",
        MODEL_NOT_FOUND.replace("ModelNot", "ModelVersionNot"),
    ):
        inference.Predictions(predictions_request("probe", "9.9", data=b"x"), timeout=SECONDS)


def test_predictions_without_a_name(inference, predictions_request):
    with refused(
        grpc.StatusCode.INTERNAL, "Parameter model_name is required.", "BadRequestException.()"
    ):
        inference.Predictions(predictions_request("", data=b"x"), timeout=SECONDS)


def test_stream_predictions_send_piece_by_piece(inference, predictions_request):
    answers = list(
        inference.StreamPredictions(predictions_request("pieces", body=b"x"), timeout=SECONDS)
    )
    for answer in answers:
        assert_defined(answer)
    assert [answer.prediction for answer in answers] == [b"piece 0;", b"piece 1;", b"last"]


def test_an_answer_that_is_no_stream_is_a_stream_of_one(inference, predictions_request):
    (answer,) = inference.StreamPredictions(
        predictions_request("probe", data=b"x"), timeout=SECONDS
    )
    assert seen(answer)["data"] == {"data": ["bytearray", "x"]}


def test_stream_predictions_2_keep_the_order_of_each_sequence(inference, predictions_request):
    def stream(name):
        requests = [
            predictions_request("counter", sequence=name, data=b"%d" % i) for i in (1, 2, 3)
        ]
        return inference.StreamPredictions2(iter(requests), timeout=SECONDS)

    streams = [stream("a"), stream("b")]
    for answers in streams:
        received = list(answers)
        for answer in received:
            assert_defined(answer)
            assert not answer.HasField("status"), answer.status
        assert [answer.prediction for answer in received] == [b"1", b"3", b"6"]


def test_stream_predictions_2_tell_of_a_failure_within_the_stream(
    inference, predictions_request, stubs
):
    request = predictions_request("nobody", sequence="a", data=b"1")
    (answer,) = inference.StreamPredictions2(iter([request]), timeout=SECONDS)
    assert_defined(answer)
    assert answer.status.code == grpc.StatusCode.INTERNAL.value[0]
    assert answer.status.message == "Model not found: nobody"
    (detail,) = answer.status.details
    info = stubs.error_details.ErrorInfo()
    assert detail.Unpack(info)
    assert info.reason == MODEL_NOT_FOUND


# management.proto


def call(management, stubs, name, **fields):
    """One management call; the text of its answer."""
    request = getattr(stubs.management, f"{name}Request")(**fields)
    request = type(request).FromString(request.SerializeToString() + UNKNOWN_FIELD)
    answer = getattr(management, name)(request, timeout=SECONDS)
    assert_defined(answer)
    return answer.msg


def test_the_life_of_a_model(management, stubs):
    def ask(name, **fields):
        return call(management, stubs, name, **fields)

    for version in ("1.0", "2.0"):
        said = ask(
            "RegisterModel",
            url=f"versions-{version}.mar",
            model_name="living",
            initial_workers=1,
            batch_size=3,
            max_batch_delay=20,
            response_timeout=60,
            startup_timeout=70,
            synchronous=True,
        )
        assert said == f'Model "living" Version: {version} registered with 1 initial workers'
    (described,) = json.loads(ask("DescribeModel", model_name="living", model_version="2.0"))
    assert (described["modelVersion"], described["batchSize"]) == ("2.0", 3)
    assert (described["maxBatchDelay"], described["responseTimeout"]) == (20, 60)
    assert len(described["workers"]) == 1
    said = ask(
        "ScaleWorker", model_name="living", model_version="2.0", min_worker=2, synchronous=True
    )
    assert said == "Workers scaled to 2 for model: living, version: 2.0"
    said = ask("SetDefault", model_name="living", model_version="2.0")
    assert said == 'Default version successfully updated for model "living" to "2.0"'
    (described,) = json.loads(ask("DescribeModel", model_name="living"))
    assert (described["modelVersion"], len(described["workers"])) == ("2.0", 2)
    assert len(json.loads(ask("DescribeModel", model_name="living", model_version="all"))) == 2
    listed = json.loads(ask("ListModels", limit=100))["models"]
    assert "living" in [model["modelName"] for model in listed]
    page = json.loads(ask("ListModels", limit=1, next_page_token=1))
    assert (len(page["models"]), page["nextPageToken"]) == (1, "2")
    for version in ("1.0", "2.0"):
        said = ask("UnregisterModel", model_name="living", model_version=version)
        assert said == 'Model "living" unregistered'
    with refused(grpc.StatusCode.NOT_FOUND, "Model not found: living", MODEL_NOT_FOUND):
        ask("DescribeModel", model_name="living")


def test_processes_are_started_beside_grpc(management, stubs, server):
    """grpc's handlers of forks would say so, and every tenth registration or so would fail."""
    for _ in range(5):  # each has a process open the archive
        call(management, stubs, "RegisterModel", url="versions-1.0.mar", model_name="brief")
        call(management, stubs, "UnregisterModel", model_name="brief")
    assert "fork" not in server.console_text()


def test_customized_metadata(management, stubs, server):
    assert server.register("describing.mar", initial_workers=1).status_code == 200
    (described,) = json.loads(
        call(management, stubs, "DescribeModel", model_name="describing", customized=True)
    )
    assert described["customizedMetadata"]


@pytest.mark.parametrize(
    ("name", "fields", "status"),
    [
        ("RegisterModel", {}, grpc.StatusCode.INVALID_ARGUMENT),
        ("RegisterModel", {"url": "nobody.mar"}, grpc.StatusCode.NOT_FOUND),
        ("ScaleWorker", {"model_name": "nobody", "min_worker": 1}, grpc.StatusCode.NOT_FOUND),
        ("SetDefault", {"model_name": "nobody", "model_version": "1"}, grpc.StatusCode.NOT_FOUND),
        ("UnregisterModel", {"model_name": "nobody"}, grpc.StatusCode.NOT_FOUND),
        ("UnregisterModel", {}, grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
def test_management_calls_that_are_refused(management, stubs, name, fields, status):
    with pytest.raises(grpc.RpcError) as raised:
        call(management, stubs, name, **fields)
    assert raised.value.code() is status


# open_inference_grpc.proto


def test_the_server_lives_and_is_ready(open_inference, stubs):
    messages = stubs.open_inference_grpc
    live = open_inference.ServerLive(messages.ServerLiveRequest(), timeout=SECONDS)
    ready = open_inference.ServerReady(messages.ServerReadyRequest(), timeout=SECONDS)
    assert (live.live, ready.ready) == (True, True)


def test_a_model_is_ready(open_inference, stubs):
    request = stubs.open_inference_grpc.ModelReadyRequest(name="tensors", version="1.0")
    assert open_inference.ModelReady(request, timeout=SECONDS).ready
    request = stubs.open_inference_grpc.ModelReadyRequest(name="nobody")
    with pytest.raises(grpc.RpcError) as raised:
        open_inference.ModelReady(request, timeout=SECONDS)
    assert raised.value.code() is grpc.StatusCode.NOT_FOUND


def test_metadata_of_the_server(open_inference, stubs):
    request = stubs.open_inference_grpc.ServerMetadataRequest()
    answer = open_inference.ServerMetadata(request, timeout=SECONDS)
    assert_defined(answer)
    assert answer.name
    assert answer.version


def test_metadata_of_a_model(open_inference, stubs):
    request = stubs.open_inference_grpc.ModelMetadataRequest(name="tensors")
    answer = open_inference.ModelMetadata(request, timeout=SECONDS)
    assert_defined(answer)
    assert (answer.name, list(answer.versions)) == ("tensors", ["1.0"])


@pytest.mark.parametrize(
    ("datatype", "field", "values"),
    [
        ("BOOL", "bool_contents", [True, False]),
        ("INT8", "int_contents", [-1, 2]),
        ("INT16", "int_contents", [-300, 2]),
        ("INT32", "int_contents", [-70000, 2]),
        ("INT64", "int64_contents", [-(2**40), 2]),
        ("UINT8", "uint_contents", [255, 2]),
        ("UINT16", "uint_contents", [65535, 2]),
        ("UINT32", "uint_contents", [2**32 - 1, 2]),
        ("UINT64", "uint64_contents", [2**63 + 1, 2]),
        ("FP32", "fp32_contents", [1.5, -0.25]),
        ("FP64", "fp64_contents", [1e300, -0.25]),
    ],
)
def test_tensors_there_and_back(open_inference, stubs, datatype, field, values):
    request = stubs.open_inference_grpc.ModelInferRequest(model_name="tensors", id="mine")
    tensor = request.inputs.add(name="x", datatype=datatype, shape=[2])
    getattr(tensor.contents, field).extend(values)
    answer = open_inference.ModelInfer(request, timeout=SECONDS)
    assert_defined(answer)
    assert (answer.model_name, answer.model_version, answer.id) == ("tensors", "1.0", "mine")
    (output,) = answer.outputs
    assert (output.name, output.datatype, list(output.shape)) == ("x", datatype, [2])
    assert list(getattr(output.contents, field)) == values


def test_inference_of_no_model(open_inference, stubs):
    request = stubs.open_inference_grpc.ModelInferRequest(model_name="nobody")
    with pytest.raises(grpc.RpcError) as raised:
        open_inference.ModelInfer(request, timeout=SECONDS)
    assert "nobody" in raised.value.details()
