import base64
import io
import sys
import threading
import warnings

import numpy as np
import pytest
import torch
from PIL import Image

from marserve.backend.errors import PredictionException
from marserve.handlers.image_classifier import ImageClassifier
from marserve.handlers.image_segmenter import ImageSegmenter
from marserve.handlers.inputs.images import decode_image
from marserve.handlers.object_detector import ObjectDetector
from marserve.handlers.refusals import RefusedInputs
from marserve.handlers.vision_handler import VisionHandler

RED, BLUE = (255, 0, 0), (0, 0, 255)


def encode(colour=RED, mode="RGB", file_format="PNG", size=(4, 4)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, colour).convert(mode).save(file, file_format)
    return file.getvalue()


NOISE = Image.effect_noise((64, 64), 100)


def cut_short() -> bytes:
    file = io.BytesIO()
    NOISE.save(file, "JPEG")
    return file.getvalue()[:-500]


class Recorder(torch.nn.Module):
    """Returns the mean of each channel and stores the batch sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[int] = []

    def forward(self, x):
        self.batches.append(len(x))
        return x.mean(dim=(2, 3))


def to_tensor(image: Image.Image) -> torch.Tensor:
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return pixels.reshape(image.height, image.width, 3).permute(2, 0, 1).float() / 255


class Means(VisionHandler):
    image_processing = staticmethod(to_tensor)

    def initialize(self, context) -> None:
        self.model = Recorder()
        self.device = torch.device("cpu")


@pytest.fixture
def run(make_context, begin_batch):
    """Run a handler over a batch; return answers, context and model."""

    def run(handler, *rows, headers=None):
        context = make_context()
        handler.initialize(context)
        begin_batch(context, *(headers or [{}] * len(rows)))
        return handler.handle(list(rows), context), context, handler.model

    return run


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
@pytest.mark.parametrize("key", ["data", "body"])
def test_image_files(run, kind, key):
    answers, _, _ = run(Means(), {key: kind(encode())}, {key: kind(encode(BLUE))})
    assert answers == [[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]


def test_base64(run):
    assert run(Means(), {"body": base64.b64encode(encode()).decode()})[0] == [[1.0, 0.0, 0.0]]


def test_pixels_as_numbers(run):
    assert run(Means(), {"body": [[[1]], [[2]], [[3]]]})[0] == [[1.0, 2.0, 3.0]]


@pytest.mark.parametrize("value", [5, True, 1.5, [10**400], [[1], [2, 3]], {"a": 1}])
def test_numbers_that_are_no_image_are_refused(run, value):
    [answer], _, _ = run(Means(), {"body": value})
    assert answer["code"] == 400


def test_empty_data_falls_to_body(run):
    assert run(Means(), {"data": b"", "body": encode()})[0] == [[1.0, 0.0, 0.0]]


def deep(*values: int) -> bytes:
    """A grey image of 16 bits and one line."""
    pixels = b"".join(value.to_bytes(2, "little") for value in values)
    file = io.BytesIO()
    Image.frombytes("I;16", (len(values), 1), pixels).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "1", "CMYK"])
def test_a_custom_handler_gets_the_image_in_the_mode_of_the_file(run, mode):
    class Modes(Means):
        @staticmethod
        def image_processing(image):
            seen.append(image.mode)
            return torch.zeros(3, 1, 1)

    seen = []
    run(Modes(), {"body": encode((255, 255, 255), mode, "TIFF")})
    assert seen == [mode]


def test_a_custom_handler_gets_all_sixteen_bits(run):
    class Depths(Means):
        @staticmethod
        def image_processing(image):
            seen.extend(image.getpixel((x, 0)) for x in range(image.width))
            return torch.zeros(3, 1, 1)

    seen = []
    run(Depths(), {"body": deep(0, 300, 65535)})
    assert seen == [0, 300, 65535]


@pytest.mark.parametrize("handler", [ImageClassifier, ImageSegmenter, ObjectDetector])
@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "1", "CMYK"])
def test_built_in_handlers_convert_images_to_three_channels(handler, mode):
    white = decode_image(encode((255, 255, 255), mode, "TIFF"))
    tensor = handler.image_processing(white)
    assert tensor.shape[0] == 3
    assert torch.equal(tensor, handler.image_processing(Image.new("RGB", (4, 4), (255, 255, 255))))


def test_built_in_handlers_keep_the_shades_of_sixteen_bits():
    tensor = ObjectDetector.image_processing(decode_image(deep(0, 32896, 65535)))
    assert torch.allclose(tensor[:, 0], torch.tensor([0, 128 / 255, 1.0]), atol=1 / 255)


def test_image_processing_keeps_arrays():
    assert ObjectDetector.image_processing(np.zeros((2, 2, 4), np.uint8)).shape == (4, 2, 2)


BAD = {
    "no image": b"kitten",
    "empty": b"",
    "cut short": cut_short(),
    "broken base64": "kitten!",
    "ragged numbers": [[1], [2, 3]],
    "object": {"instances": []},
    "nothing": None,
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
def test_an_undecodable_image_is_refused_alone(run, bad):
    answers, context, model = run(
        Means(), {"body": encode()}, {"body": bad}, {"data": encode(BLUE)}
    )

    assert [answers[0], answers[2]] == [[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]
    assert answers[1].keys() == {"code", "type", "message"}
    assert (answers[1]["code"], answers[1]["type"]) == (400, "BadRequestException")
    assert answers[1]["message"]
    assert [context.get_response_status(i)[0] for i in range(3)] == [200, 400, 200]
    assert context.get_response_content_type(1) == "application/json"
    assert model.batches == [2]


def test_the_message_does_not_show_the_servers_objects(run):
    [answer], _, _ = run(Means(), {"body": b"kitten"})
    assert answer["message"] == "The input is not an image of a known format."


def test_the_message_names_the_fields_of_a_form(run):
    [answer], _, _ = run(Means(), {"image": encode()})
    assert answer["message"].endswith("name the form field `data` or `body`.")


def test_a_batch_of_invalid_images_skips_the_model(run):
    answers, context, model = run(Means(), {"body": b"1"}, {"body": b"2"})
    assert [item["code"] for item in answers] == [400, 400]
    assert context.get_response_status(1)[0] == 400
    assert model.batches == []
    assert len(context.metrics.drain()) == 1


def test_a_valid_batch_is_decoded_once(run):
    decoded = []

    class Counting(Means):
        @staticmethod
        def image_processing(image):
            decoded.append(image)
            return to_tensor(image)

    run(Counting(), {"body": encode()}, {"body": encode()})
    assert len(decoded) == 2


def test_too_many_pixels(run, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 16)
    answers, _, _ = run(Means(), {"body": encode(size=(9, 9))}, {"body": encode()})
    assert "exceeds limit" in answers[0]["message"]
    assert answers[1] == [1.0, 0.0, 0.0]


class Overriding(Means):
    """Written for TorchServe: calls super, counts rows, sets headers by index."""

    def preprocess(self, data):
        tensor = super().preprocess(data)
        assert len(tensor) == len(data)
        return tensor

    def postprocess(self, data):
        for index in range(len(data)):
            who = self.context.get_request_header(index, "who")
            self.context.set_response_header(index, "who", who)
        return ["image"] * len(data)


def test_a_subclass_gets_a_batch_of_valid_requests(run):
    answers, context, _ = run(
        Overriding(),
        {"body": b"bad"},
        {"body": encode()},
        {"body": encode()},
        headers=[{"who": name} for name in "abc"],
    )
    assert answers[1:] == ["image", "image"]
    assert [context.get_response_headers(i).get("who") for i in range(3)] == [None, "b", "c"]


def test_a_wrong_number_of_answers_is_passed_to_the_service(run):
    class Silent(Means):
        def postprocess(self, data):
            return []

    assert run(Silent(), {"body": encode()}, {"body": b"bad"})[0] == []


def test_outside_handle_an_invalid_image_is_an_exception_with_status_400():
    handler = Means()
    handler.initialize(None)
    with pytest.raises(RefusedInputs, match="Request 1: The input is not") as caught:
        handler.preprocess([{"body": encode()}, {"body": b"bad"}])
    assert isinstance(caught.value, PredictionException)
    assert caught.value.error_code == 400


def test_an_error_of_the_model_does_not_refuse_the_image(run):
    class Broken(Means):
        @staticmethod
        def image_processing(image):
            raise ValueError("my own fault")

    with pytest.raises(ValueError, match="my own fault"):
        run(Broken(), {"body": encode()})


def test_explanations_need_captum(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "captum.attr", None)
    with pytest.raises(PredictionException, match=r"captum.* : 501"):
        run(Means(), {"body": encode()}, headers=[{"explain": "True"}])


def test_explanations_with_captum(make_context, begin_batch):
    """Of a linear model they are known: each pixel adds its value times its weight."""
    pytest.importorskip("captum")
    handler = Means()
    handler.model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 2, bias=False))
    handler.device, weights = torch.device("cpu"), handler.model[1].weight
    pixels = torch.arange(12.0).reshape(3, 2, 2)
    rows = [{"body": pixels.tolist(), "target": "1"}, {"body": (2 * pixels).tolist()}]
    explained = begin_batch(make_context(), *[{"explain": "True"}] * 2)

    answers = handler.handle(rows, explained)

    expected = pixels * weights[1].reshape(3, 2, 2)
    assert torch.allclose(torch.tensor(answers), torch.stack([expected, 2 * expected]), atol=1e-4)


def test_the_limit_of_pixels_is_removed_if_configured(make_context, tmp_path, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(torch.nn.Identity()), tmp_path / "model.pt")
    context = make_context(serializedFile="model.pt")

    VisionHandler().initialize(context)
    assert Image.MAX_IMAGE_PIXELS == 16

    context.system_properties["limit_max_image_pixels"] = False
    VisionHandler().initialize(context)
    assert Image.MAX_IMAGE_PIXELS is None


def test_the_sample_is_a_file_like_a_photograph():
    sample, other = Means().sample_input()
    assert sample != other
    image = Image.open(io.BytesIO(sample))
    assert (image.format, image.mode, image.size) == ("JPEG", "RGB", (500, 375))
    assert 40_000 < len(sample) < 150_000
    assert (sample, other) == Means().sample_input()


@pytest.mark.parametrize("threads", [1, 3])
def test_images_are_decoded_in_threads_with_the_same_answers(make_context, begin_batch, threads):
    """The configured number of threads, answers in order, refusals at their index."""
    names = set()

    class Watched(Means):
        def image_processing(self, image):
            names.add(threading.current_thread().name.partition("_")[0])
            assert self.context.get_request_id(0) == "id-0"
            return to_tensor(image)

    context = make_context(yaml={"handler": {"decode_threads": threads}})
    handler = Watched()
    handler.initialize(context)
    rows = [{"body": encode(colour)} for colour in (RED, BLUE, RED)] + [{"body": b"kitten"}]
    answers = handler.handle(rows, begin_batch(context, {}, {}, {}, {}))
    assert answers[:3] == [[1.0, 0.0, 0.0], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]
    assert answers[3]["code"] == 400
    assert names == {"MainThread" if threads == 1 else "decode"}


def test_a_single_image_needs_no_threads(run):
    handler = Means()
    run(handler, {"body": encode()})
    assert "decode_threads" not in vars(handler)


def test_an_error_in_image_processing_fails_the_batch(make_context, begin_batch):
    class Broken(Means):
        def image_processing(self, image):
            raise ZeroDivisionError

    context = make_context(yaml={"handler": {"decode_threads": 2}})
    handler = Broken()
    handler.initialize(context)
    with pytest.raises(ZeroDivisionError):
        handler.handle([{"body": encode()}] * 2, begin_batch(context, {}, {}))
