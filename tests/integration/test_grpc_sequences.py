"""Sequences over gRPC: both streams, a worker that is killed, and streams that are broken off."""

import json
import os
import queue
import signal

import grpc
import pytest

from marserve.frontend.grpc.messages import load_proto

pytestmark = pytest.mark.integration

PATIENCE = 20
SERVICE = "/org.pytorch.serve.grpc.inference.InferenceAPIsService"
MESSAGES = load_proto("inference.proto").messages
CONFIG = """
minWorkers: 1
maxWorkers: 1
batchSize: 4
maxBatchDelay: 1
sequenceBatching: true
sequenceMaxIdleMSec: 60000
maxSequenceJobQueueSize: 8
"""


class Talk:
    """A stream of requests to a model, and their answers."""

    def __init__(self, channel, model):
        self.model = model
        self.requests = queue.SimpleQueue()
        call = channel.stream_stream(
            f"{SERVICE}/StreamPredictions2",
            request_serializer=MESSAGES.PredictionsRequest.SerializeToString,
            response_deserializer=MESSAGES.PredictionResponse.FromString,
        )
        self.answers = call(iter(self.requests.get, None), timeout=PATIENCE)

    def send(self, sequence_id="", start=False, end=False, **orders):
        self.requests.put(request(self.model, sequence_id, start, end, **orders))

    def ask(self, *arguments, **orders):
        self.send(*arguments, **orders)
        return next(self.answers)

    def finish(self):
        self.requests.put(None)
        return list(self.answers)


def request(model, sequence_id="", start=False, end=False, **orders):
    marks = {"ts_request_sequence_start": start, "ts_request_sequence_end": end}
    inputs = {name: b"true" for name, is_set in marks.items() if is_set}
    inputs["body"] = json.dumps(orders).encode()
    return MESSAGES.PredictionsRequest(model_name=model, sequence_id=sequence_id, input=inputs)


def said(answer):
    assert not answer.HasField("status"), answer.status
    return json.loads(answer.prediction)["said"]


@pytest.fixture
def channel(server):
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_ports['inference']}") as opened:
        yield opened


@pytest.fixture
def serve(server, request, tmp_path, handlers):
    """Install the model; over gRPC the handler gets bytes."""
    source = (handlers / "rememberer.py").read_text()
    path = tmp_path / "rememberer.py"
    path.write_text(f"import json\n{source}".replace('row["body"]', 'json.loads(row["body"])'))

    def install(more=""):
        name = f"grpc-{abs(hash(request.node.name))}"
        server.install(path, name, CONFIG + more, initial_workers=None)
        return name

    return install


def sequences(server, model):
    return server.describe(model)["sequences"]


def test_a_stream_carries_several_sequences_each_in_its_order(serve, channel):
    talk = Talk(channel, serve())
    for say in "xyz":
        for sequence_id in "abc":
            talk.send(sequence_id, say=say)
    answers = talk.finish()
    for sequence_id in "abc":
        own = [said(answer) for answer in answers if answer.sequence_id == sequence_id]
        assert own == ["x", "xy", "xyz"]


def test_the_server_makes_an_id_and_a_later_call_goes_on_with_it(serve, channel, server):
    model = serve()
    first = Talk(channel, model)
    made = first.ask(start=True, say="x").sequence_id
    assert made.startswith("ts-seq-")
    assert first.finish() == []
    second = Talk(channel, model)
    assert said(second.ask(made, say="y", end=True)) == "xy"
    over = second.ask(made, say="z")
    assert over.status.code == grpc.StatusCode.ABORTED.value[0]
    assert over.sequence_id == made
    assert said(second.ask("mine", say="n")) == "n"
    assert sequences(server, model)["ended"] == {"end": 1}
    second.finish()


def test_the_other_stream_and_the_plain_call_know_sequences_too(serve, channel):
    model = serve("continuousBatching: true")
    stream = channel.unary_stream(
        f"{SERVICE}/StreamPredictions",
        request_serializer=MESSAGES.PredictionsRequest.SerializeToString,
        response_deserializer=MESSAGES.PredictionResponse.FromString,
    )
    plain = channel.unary_unary(
        f"{SERVICE}/Predictions",
        request_serializer=MESSAGES.PredictionsRequest.SerializeToString,
        response_deserializer=MESSAGES.PredictionResponse.FromString,
    )
    pieces = stream(request(model, "a", say="x", pieces=1_000_000), timeout=PATIENCE)
    assert next(pieces).sequence_id == "a"
    answer = plain(request(model, "a", say="y"), timeout=PATIENCE)  # beside the stream
    assert (said(answer), answer.sequence_id) == ("xy", "a")
    pieces.cancel()
    assert said(plain(request(model, "a", say="z"), timeout=PATIENCE)) == "xyz"


def test_a_killed_worker_is_told_in_the_stream(serve, channel, server):
    model = serve()
    talk = Talk(channel, model)
    pid = json.loads(talk.ask("a", say="x").prediction)["pid"]
    os.kill(pid, signal.SIGKILL)
    for _ in range(2):
        lost = talk.ask("a", say="y")
        assert lost.status.code == grpc.StatusCode.ABORTED.value[0]
        assert 'Sequence "a" is over' in lost.status.message
    assert said(talk.ask("a", start=True, say="z")) == "z"
    assert talk.finish() == []
    plain = channel.unary_unary(
        f"{SERVICE}/Predictions",
        request_serializer=MESSAGES.PredictionsRequest.SerializeToString,
        response_deserializer=MESSAGES.PredictionResponse.FromString,
    )
    with pytest.raises(grpc.RpcError) as refused:
        plain(request(model, "a", do="die"), timeout=PATIENCE)
    assert refused.value.code() is grpc.StatusCode.ABORTED


def test_a_stream_that_is_broken_off_ends_its_sequences_and_leaves_nothing(
    serve, channel, server, record, make_gate, wait_for
):
    model, gate = serve(), make_gate()
    talk = Talk(channel, model)
    assert said(talk.ask("idle", say="x", record=str(record))) == "x"
    talk.send("busy", say="y", gate=gate.path)
    gate.wait_entered()
    talk.send("busy", say="z")
    server.wait_queued(model, 1)
    talk.answers.cancel()
    server.wait_queued(model, 0)
    gate.open()
    wait_for(lambda: sequences(server, model)["open"] == 0)
    wait_for(lambda: len(record.read_text().splitlines()) == 2)
    assert sorted(record.read_text().splitlines()) == ["busy client_gone y", "idle client_gone x"]
    again = Talk(channel, model)
    assert again.ask("idle").status.code == grpc.StatusCode.ABORTED.value[0]
    assert said(again.ask("idle", start=True, say="n")) == "n"
    again.finish()
    opened = server.metrics("marserve_open_requests")
    assert [count for series, count in opened.items() if f'"{model}"' in series] == [0]


OPEN_INFERENCE = load_proto("open_inference.proto").messages
ANSWERS = "def handle(data, context):\n    return data and ['x'] * len(data)\n"


def test_a_stream_of_the_open_inference_protocol_ends_its_sequences_if_it_is_broken_off(
    server, channel, wait_for
):
    """They stayed open until they had been idle for long."""
    server.install(ANSWERS, "tensors", CONFIG, initial_workers=None)
    requests = queue.SimpleQueue()
    answers = channel.stream_stream(
        "/inference.GRPCInferenceService/ModelStreamInfer",
        request_serializer=OPEN_INFERENCE.ModelInferRequest.SerializeToString,
        response_deserializer=OPEN_INFERENCE.ModelStreamInferResponse.FromString,
    )(iter(requests.get, None), timeout=PATIENCE)
    for sequence_id in ("a", "b"):
        message = OPEN_INFERENCE.ModelInferRequest(model_name="tensors")
        message.inputs.add(name="x", datatype="INT8", shape=[0])
        message.parameters["sequence_id"].string_param = sequence_id
        message.parameters["sequence_start"].bool_param = True
        requests.put(message)
        assert not next(answers).error_message
    assert sequences(server, "tensors")["open"] == 2
    answers.cancel()
    wait_for(lambda: sequences(server, "tensors")["ended"] == {"client_gone": 2})
    requests.put(None)
