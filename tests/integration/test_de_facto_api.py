"""What archives of other projects do that no documentation promises, and TorchServe takes."""

import pytest
from servers import make_archive

pytestmark = pytest.mark.integration

torch = pytest.importorskip("torch")

SAGEMAKER_CLASS = """
class HandlerService:
    def initialize(self, context):
        self.name = context.model_name

    def handle(self, data, context):
        return [self.name] * len(data)
"""
SHADOWED = """
from operators_module import OWNER

def handle(data, context):
    return data and [OWNER] * len(data)
"""
PROCESSORS = """
from ts.context import RequestProcessor

def handle(data, context):
    if data is None:
        return
    context._request_processor = [RequestProcessor({"X-Mine": "seen"}) for _ in data]
    context.set_response_header(0, "X-Answer", context.get_request_header(0, "X-Mine"))
    context.set_response_status(202, "Taken", 0)
    return ["fine"] * len(data)
"""
PIECES = """
from ts.protocol.otf_message_handler import create_predict_response

def handle(data, context):
    if data is None:
        return
    for piece in ("one ", "two "):
        message = create_predict_response(
            [piece], context.request_ids, "Intermediate", 200, context, True
        )
        context.cl_socket.sendall(message)
    return ["three"]
"""
MODEL = """
import torch

class Tripled(torch.nn.Module):
    def forward(self, x):
        return 3 * x
"""
COPIED = """
import os
from abc import ABC
from ts.torch_handler.base_handler import IPEX_AVAILABLE, PROFILER_AVAILABLE, BaseHandler

class Copied(BaseHandler, ABC):
    def __init__(self):
        super(BaseHandler, self).__init__()
        self.mine = []

    def preprocess(self, data):
        return super().preprocess([float(row["body"]) for row in data])

    def handle(self, data, context):
        self.context = context
        if os.environ.get("ENABLE_TORCH_PROFILER") and PROFILER_AVAILABLE:
            return self._infer_with_profiler(data=data)[0]
        if self._is_describe():
            return [self.describe_handle()]
        ready = self.preprocess(data)
        if self._is_explain():
            return self.explain_handle(ready, data)
        context.metrics.add_counter("Answered", 1, "percent", None)
        return self.postprocess(self.inference(ready))

    def describe_handle(self):
        return {"ipex": IPEX_AVAILABLE}

    def get_insights(self, tensor_data, inputs, target=0):
        return ["because"]
"""


@pytest.fixture(scope="module")
def server(prepare_server, tmp_path_factory):
    operators = tmp_path_factory.mktemp("operators")
    (operators / "operators_module.py").write_text("OWNER = 'operator'\n")
    caches = tmp_path_factory.mktemp("caches")  # torch.compile leaves one, in TMPDIR by default
    environment = {"PYTHONPATH": str(operators), "TORCHINDUCTOR_CACHE_DIR": str(caches)}
    with prepare_server(
        environment, preload_modules="torch", model_metrics_auto_detect="true"
    ) as server:
        server.start()
        yield server
        server.stop()


@pytest.fixture
def serve(server, tmp_path):
    """Serve a handler from a file of this name, with others beside it."""

    def serve(source, name, file="handler.py", function="", config="", model="", **others):
        (tmp_path / file).write_text(source)
        for other, text in others.items():
            (tmp_path / f"{other}.py").write_text(text)
        archive = make_archive(
            server.store,
            tmp_path / f"{file}{function}",
            name,
            config,
            model_file=str(tmp_path / f"{model}.py") if model else None,
            extra_files=",".join(str(tmp_path / f"{other}.py") for other in others) or None,
        )
        answer = server.register(archive, initial_workers=1)
        assert answer.status_code == 200, answer.text

    return serve


def test_a_service_file_of_sagemaker_with_only_a_class(server, serve):
    serve(SAGEMAKER_CLASS, "sagemaker", "handler_service.py", ":handle")
    assert server.predict("sagemaker", data=b"x").text == "sagemaker"


def test_pythonpath_goes_before_the_modules_of_an_archive(server, serve):
    serve(SHADOWED, "shadowed", operators_module="OWNER = 'archive'\n")
    assert server.predict("shadowed", data=b"x").text == "operator"


def test_processors_that_a_handler_puts_in_place_answer(server, serve):
    serve(PROCESSORS, "processors")
    answer = server.predict("processors", data=b"x")
    assert (answer.status_code, answer.headers["X-Answer"], answer.text) == (202, "seen", "fine")


def test_pieces_sent_as_messages_of_torchserves_worker(server, serve):
    serve(PIECES, "pieces")
    assert server.predict("pieces", data=b"x").text == "one two three"


def test_a_copied_handle_in_a_class_that_skips_the_constructor_of_its_base(server, serve):
    config = "pt2: {compile: {enable: true, backend: eager}}\n"
    serve(COPIED, "copied", config=config, model="tripled", tripled=MODEL)
    assert server.predict("copied", data=b"2").text == "6.0"
    assert server.inference("POST", "/explanations/copied", data=b"2").text == "because"
    described = server.management("GET", "/models/copied", params={"customized": "true"}).json()
    assert described[0]["customizedMetadata"] == {"ipex": False}
    server.wait_logged("model_log.log", "Compiled model with backend eager")
    [(series, value)] = server.metrics("Answered").items()
    assert (value, 'Level="Model"' in series) == (1.0, True)
