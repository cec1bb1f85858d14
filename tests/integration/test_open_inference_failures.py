"""The Open Inference Protocol where something goes wrong: workers, clients, messages."""

import json
import os
import signal
import struct
import threading

import pytest
from grpc_client import connected, failure

from marserve.frontend.grpc.messages import load_proto

pytestmark = pytest.mark.integration

MESSAGES = load_proto("open_inference.proto").messages
INFER = "/inference.GRPCInferenceService/ModelInfer"
HANDLER = """
import json, os
from pathlib import Path

def handle(data, context):
    return data and [answer(json.loads(row["body"]["inputs"][0]["data"][0]), context)
                     for row in data]

def answer(orders, context):
    if "record" in orders:
        with Path(orders["record"]).open("a") as file:
            file.write("seen\\n")
    for number in range(orders.get("pieces", 1) - 1):
        context.send_intermediate([number])
        if "gate" in orders:
            Path(orders["gate"]).read_text()
    if "gate" in orders and "pieces" not in orders:
        Path(orders["gate"]).read_text()
    if "exit" in orders:
        os._exit(3)
    return [5]
"""


@pytest.fixture(scope="module")
def server(share_server):
    with share_server(ts_open_inference_protocol="true") as shared:
        shared.install(HANDLER, "m")
        yield shared


@pytest.fixture
def client(server):
    with connected(server) as opened:
        yield opened


def request_of(**orders):
    text = json.dumps(orders).encode()
    request = MESSAGES.ModelInferRequest(model_name="m", id="7")
    request.inputs.add(name="x", datatype="BYTES", shape=[1])
    request.raw_input_contents.append(struct.pack("<I", len(text)) + text)
    return request


def unary(client, request, **options):
    return client.method("open_inference", "ModelInfer").future(request, **options)


def stream(client, request, **options):
    """The same in a stream of requests, which stays open."""
    sent = threading.Event()

    def requests():
        yield request
        sent.wait(20)

    answers = client.method("open_inference", "ModelStreamInfer")(requests(), **options)
    answers.add_done_callback(lambda _: sent.set())
    return answers


def number_in(response):
    (output,) = response.outputs
    assert (response.id, output.datatype) == ("7", "INT64")
    return struct.unpack("<q", response.raw_output_contents[0])[0]


def assert_nothing_left(server):
    server.wait_taken("m", 0)
    with connected(server) as fresh:
        assert number_in(unary(fresh, request_of(), timeout=20).result()) == 5
    server.wait_taken("m", 0)


either = pytest.mark.parametrize("start", [unary, stream])


@either
def test_a_cancelled_inference_leaves_the_queue(server, client, start, make_gate, tmp_path):
    gate, record = make_gate(), tmp_path / "seen"
    ahead = unary(client, request_of(gate=gate.path))
    gate.wait_entered()
    queued = start(client, request_of(record=str(record)))
    server.wait_queued("m", 1)
    queued.cancel()
    server.wait_queued("m", 0)
    gate.open()
    assert number_in(ahead.result()) == 5
    assert_nothing_left(server)
    assert not record.exists()


@either
def test_an_inference_past_its_deadline_leaves_the_queue(
    server, client, start, make_gate, tmp_path
):
    gate, record = make_gate(), tmp_path / "seen"
    ahead = unary(client, request_of(gate=gate.path))
    gate.wait_entered()
    late = start(client, request_of(record=str(record)), timeout=0.3)
    if start is unary:
        assert failure(late.result)[0] == "DEADLINE_EXCEEDED"
    else:
        assert failure(lambda: late)[0] == "DEADLINE_EXCEEDED"
    server.wait_queued("m", 0)
    gate.open()
    assert number_in(ahead.result()) == 5
    assert_nothing_left(server)
    assert not record.exists()


@either
def test_an_inference_whose_worker_is_killed_is_answered_once(
    server, client, start, make_gate, tmp_path
):
    gate, record = make_gate(), tmp_path / "seen"
    call = start(client, request_of(record=str(record), gate=gate.path))
    gate.wait_entered()
    os.kill(server.worker("m")["pid"], signal.SIGKILL)
    gate.open_for_all()
    if start is unary:
        assert number_in(call.result()) == 5
    else:
        assert number_in(next(call).infer_response) == 5
        call.cancel()
    assert record.read_text() == "seen\n" * 2
    assert_nothing_left(server)


def test_an_inference_that_kills_its_worker_again_is_told_so(server, client):
    code, text = failure(unary(client, request_of(exit=True)).result)
    assert (code, text[:12]) == ("INTERNAL", "Worker died.")
    server.wait_workers("m", "READY")
    answers = stream(client, request_of(pieces=2, exit=True))
    assert number_in(next(answers).infer_response) == 0
    assert next(answers).error_message
    answers.cancel()
    server.wait_workers("m", "READY")
    assert_nothing_left(server)


def test_pieces_that_nobody_reads_are_closed(server, client, make_gate):
    gate = make_gate()
    answers = stream(client, request_of(pieces=3, gate=gate.path))
    first = next(answers).infer_response
    assert number_in(first) == 0
    assert first.parameters["triton_final_response"].bool_param is False
    answers.cancel()
    gate.open_for_all()
    assert_nothing_left(server)


def test_pieces_come_as_they_are_made_and_the_last_says_so(server, client, make_gate):
    gate = make_gate()
    answers = stream(client, request_of(pieces=2, gate=gate.path))
    assert number_in(next(answers).infer_response) == 0
    gate.open_for_all()
    last = next(answers).infer_response
    assert number_in(last) == 5
    assert last.parameters["triton_final_response"].bool_param is True
    answers.cancel()
    code, text = failure(unary(client, request_of(pieces=2)).result)
    assert code == "UNIMPLEMENTED"
    assert "ModelStreamInfer" in text
    assert_nothing_left(server)


STEPPER = """
class Stepper:
    def initialize(self, context):
        self.left = {}

    def handle(self, data, context):
        ids = [context.get_request_id(place) for place in range(len(data))]
        for id_, row in zip(ids, data):
            if row:
                self.left[id_] = row["body"]["inputs"][0]["data"][0]
        for id_ in ids:
            self.left[id_] -= 1
        left = [self.left[id_] for id_ in ids]
        context.stopping_criteria = [lambda _, n=n: n <= 0 for n in left]
        return left
"""


def test_the_steps_of_continuous_batching_are_pieces(server, client):
    server.install(STEPPER, "steps", "continuousBatching: true\n", batch_size=4)
    requests = []
    for steps in (3, 1, 2):
        request = MESSAGES.ModelInferRequest(model_name="steps", id="7")
        request.inputs.add(name="x", datatype="INT64", shape=[1])
        request.raw_input_contents.append(struct.pack("<q", steps))
        requests.append(request)
    for steps, request in zip((3, 1, 2), requests, strict=True):
        answers = stream(client, request)
        found = [next(answers).infer_response for _ in range(steps)]
        assert [number_in(response) for response in found] == list(range(steps))[::-1]
        finals = [each.parameters["triton_final_response"].bool_param for each in found]
        assert finals == [False] * (steps - 1) + [True]
        answers.cancel()


WHOLE = request_of().SerializeToString()


@pytest.mark.parametrize(
    "data",
    [WHOLE[:-1], WHOLE[:20], b"\xff" * 100, b"\x3a\xff\xff\xff\xff\x07", b"\x0a\x01\xff"],
    ids=["cut off", "cut off early", "garbage", "2 GB", "not UTF-8"],
)
def test_what_is_no_message_is_refused(server, client, data):
    call = client.channel.unary_unary(INFER)
    assert failure(lambda: call(data, timeout=10))[0] == "INVALID_ARGUMENT"
    assert_nothing_left(server)


def test_many_dimensions_and_tensors_are_refused_quickly(server, client):
    request = request_of()
    request.inputs[0].shape.extend([2**63 - 1] * 5000)
    code, text = failure(unary(client, request).result)
    assert (code, "5001 dimensions" in text) == ("INVALID_ARGUMENT", True)
    request.inputs[0].shape.extend([2**63 - 1] * 100_000)
    assert failure(unary(client, request).result)[0] == "INVALID_ARGUMENT"
    request = MESSAGES.ModelInferRequest(model_name="m")
    for _ in range(20_000):
        request.inputs.add(name="x", datatype="BYTES", shape=[1])
    assert failure(unary(client, request).result)[0] == "INVALID_ARGUMENT"
    request = request_of()
    request.inputs[0].shape[:] = [1_000_000]
    request.raw_input_contents[0] = bytes(4_000_000)  # as many empty elements
    assert failure(unary(client, request).result)[0] == "UNAVAILABLE"  # the handler wants text
    assert_nothing_left(server)


def test_two_million_typed_values_do_not_hold_up_others(server, client):
    request = MESSAGES.ModelInferRequest(model_name="m")
    request.inputs.add(name="x", datatype="INT8", shape=[2_000_000])
    request.inputs[0].contents.int_contents.extend([7] * 2_000_000)
    call = unary(client, request)
    others = [unary(client, request_of(), timeout=20) for _ in range(5)]
    assert [number_in(other.result()) for other in others] == [5] * 5
    assert failure(call.result)[0] == "UNAVAILABLE"  # the handler wants text
    assert_nothing_left(server)


def test_repositories_are_managed_with_the_management_key_only(start_server):
    off = {"disable_token_authorization": "false", "ts_open_inference_protocol": "true"}
    with start_server(enable_model_api="true", **off) as closed:
        keys = json.loads((closed.directory / "key_file.json").read_text())
        bearer = {
            kind: {"authorization": f"Bearer {keys[kind]['key']}"}
            for kind in ("inference", "management")
        }

        def ask(listener, path, kind):
            send = closed.inference if listener == "inference" else closed.management
            return send("POST", path, headers=bearer[kind]).json().get("message", "")

        load = "/v2/repository/models/m/load"
        assert "Token Authorization failed" in ask("management", load, "inference")
        assert "not found in the model store: m" in ask("management", load, "management")
        assert "Token Authorization failed" in ask("inference", load, "management")
        assert "management address" in ask("inference", load, "inference")
        request = {"model_name": "m", "metadata": list(bearer["inference"].items())}
        for listener, code, text in (
            ("inference", "INVALID_ARGUMENT", "management address"),
            ("management", "PERMISSION_DENIED", "Token Authorization failed"),
        ):
            with connected(closed, listener) as client:
                found = failure(
                    lambda client=client: client.call(
                        "open_inference", "RepositoryModelLoad", **request
                    )
                )
                assert (found[0], text in found[1]) == (code, True)


SUM = """
def handle(data, context):
    return data and [[sum(row["body"]["inputs"][0]["data"])] for row in data]
"""
DECLARED = """
openInference:
  inputs:
    - {name: x, datatype: FP32, shape: [-1]}
  outputs:
    - {name: y, datatype: FP32, shape: [1]}
"""


@pytest.fixture(scope="module", params=["", "asyncCommunication: true\n"], ids=["batch", "async"])
def declared(request, server):
    name = "coroutine" if request.param else "sum"
    handler = f"async {SUM.lstrip()}" if request.param else SUM
    server.install(handler, name, DECLARED + request.param, batch_size=4, max_batch_delay=100)
    return name


def infer(server, model, **tensor):
    tensor = {"name": "x", "datatype": "FP32", "shape": [2], "data": [1.5, 2], **tensor}
    return server.inference("POST", f"/v2/models/{model}/infer", json={"inputs": [tensor]})


def test_values_in_json_that_contradict_their_tensor_are_refused(server, declared, together):
    """They failed in the handler, with 503, or were answered."""
    cases = [
        ({"shape": [3]}, "has 2 elements; its shape [3] wants 3."),
        ({"shape": [-1, 3]}, "has 2 elements; its shape [-1, 3] wants 0."),
        ({"datatype": "FP99"}, "has the datatype 'FP99'; there are BOOL, "),
        ({"data": ["1.5", "2"]}, "has a value that is no FP32: "),
        ({"datatype": "INT8"}, "has a value that is no INT8: "),
        ({"data": [[1, 2], [3]]}, "has lists of different lengths."),
        ({"shape": [1, 1, -1]}, "has the shape [1, 1, 2]; the model takes [-1]."),
        ({"datatype": "FP64"}, "has the datatype 'FP64'; the model takes FP32."),
    ]
    # A declaration may leave out the dimension of rows, as in Triton's configurations.
    good = [{}, {"shape": [-1]}, {"shape": [1, 2]}, {"shape": [2, -1]}]
    tensors = [*good, *(tensor for tensor, _ in cases)]
    answers = together([lambda each=each: infer(server, declared, **each) for each in tensors])
    for answer in answers[: len(good)]:
        (output,) = answer.json()["outputs"]
        assert (output["name"], output["data"]) == ("y", [3.5])
    for answer, (_, why) in zip(answers[len(good) :], cases, strict=True):
        assert answer.status_code == 400
        assert answer.json()["error"].startswith(f"Input 'x' {why}")
        assert answer.json()["type"] == "BadRequestException"


def test_an_input_that_the_model_declares_may_not_be_missing(server, declared, client):
    """The handler failed, with 503."""
    answer = infer(server, declared, name="other")
    assert (answer.status_code, answer.json()["error"]) == (400, "Input 'x' is missing.")
    request = MESSAGES.ModelInferRequest(model_name=declared)
    request.inputs.add(name="other", datatype="FP32", shape=[1])
    request.raw_input_contents.append(struct.pack("<f", 1))
    code, message = failure(lambda: unary(client, request).result())
    assert (code, "Input 'x' is missing." in message) == ("INVALID_ARGUMENT", True)


def test_an_input_that_the_model_declares_must_be_there_once(server, declared, client):
    """The last one was checked, and the handler took the first one: 503."""
    good = {"name": "x", "datatype": "FP32", "shape": [1], "data": [1.0]}
    wrong = {**good, "shape": [1, 1]}
    sentence = "Input 'x' is there more than once."
    path = f"/v2/models/{declared}/infer"
    answer = server.inference("POST", path, json={"inputs": [wrong, good]})
    assert (answer.status_code, answer.json()["error"]) == (400, sentence)
    request = MESSAGES.ModelInferRequest(model_name=declared)
    for shape in ([1, 1], [1]):
        request.inputs.add(name="x", datatype="FP32", shape=shape)
        request.raw_input_contents.append(struct.pack("<f", 1))
    code, message = failure(lambda: unary(client, request).result())
    assert (code, sentence in message) == ("INVALID_ARGUMENT", True)


@pytest.mark.parametrize("document", [{}, {"inputs": None}, {"instances": [[1.0]]}])
def test_a_document_without_inputs_for_a_model_that_declares_some(server, declared, document):
    answer = server.inference("POST", f"/v2/models/{declared}/infer", json=document)
    sentence = "inputs must be a list of at least one tensor."
    assert (answer.status_code, answer.json()["error"]) == (400, sentence)


LOOSE = """
openInference:
  inputs:
    - {name: x, datatype: FP32, shape: [3, -1]}
    - {name: s, datatype: INT64, shape: [1], optional: true}
    - {name: t, datatype: BYTES, shape: [], optional: true}
"""
COUNT = """
def handle(data, context):
    return data and [[len(row["body"]["inputs"])] for row in data]
"""


def test_a_declaration_may_be_looser_than_a_request(server, client):
    server.install(COUNT, "loose", LOOSE)
    x = {"name": "x", "datatype": "FP32", "shape": [2, 3, 1], "data": [0] * 6}
    s = {"name": "s", "datatype": "INT64", "shape": [], "data": [1]}
    t = {"name": "t", "datatype": "BYTES", "shape": [1], "data": ["a"]}
    other = {"name": "o", "datatype": "UINT8", "shape": [1], "data": [1]}

    def ask(*inputs):
        return server.inference("POST", "/v2/models/loose/infer", json={"inputs": inputs})

    for inputs in ([x], [x, s], [x, t, other], [{**x, "shape": [3, 2]}], [{**x, "shape": [-1, 2]}]):
        assert ask(*inputs).json()["outputs"][0]["data"] == [len(inputs)]
    assert ask({**x, "shape": [2, 1, 3]}).status_code == 400
    assert ask({**x, "shape": [6]}).status_code == 400
    assert ask(x, {**s, "shape": [2], "data": [1, 2]}).status_code == 400
    assert ask(s).json()["error"] == "Input 'x' is missing."
    request = MESSAGES.ModelInferRequest(model_name="loose")
    request.inputs.add(name="x", datatype="FP32", shape=[1, 3, 1])
    request.raw_input_contents.append(bytes(12))
    assert list(unary(client, request).result().outputs[0].shape) == [1]
    metadata = server.inference("GET", "/v2/models/loose").json()["inputs"]
    assert metadata[1] == {"name": "s", "datatype": "INT64", "shape": [1]}


def test_a_model_that_declares_no_tensors_gets_any_json(server):
    server.install(SUM, "undeclared")
    assert infer(server, "undeclared", datatype="FP99", shape=[7]).json() == [3.5]
