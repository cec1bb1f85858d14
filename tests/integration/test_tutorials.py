"""Two tutorials that users of TorchServe start with: grey pictures, and metrics of one's own.

The handler subclasses the image classifier, brings its own transforms for pictures of one channel,
and emits metrics of which some stand in metrics.yaml and some do not. Every answer of the first
tutorial failed when pictures reached it in RGB; every answer of the second when a declared metric
was not there to be fetched.
"""

import io

import pytest
from servers import make_archive

pytestmark = pytest.mark.integration

torch = pytest.importorskip("torch")
pytest.importorskip("torchvision")

MODEL = """
import torch

class Brightest(torch.nn.Module):
    # Which of ten columns of a picture of one channel is the brightest.
    def __init__(self):
        super().__init__()
        self.weigh = torch.nn.Conv2d(1, 1, (10, 1), bias=False)

    def forward(self, pictures):
        return self.weigh(pictures).flatten(1)
"""
HANDLER = """
from torchvision import transforms
from ts.metrics.dimension import Dimension
from ts.metrics.metric_type_enum import MetricTypes
from ts.torch_handler.image_classifier import ImageClassifier


class BrightestColumn(ImageClassifier):
    image_processing = transforms.Compose(
        [transforms.ToTensor(), transforms.Normalize((0.5,), (0.25,))]
    )

    def initialize(self, context):
        super().initialize(context)
        context.metrics.add_metric("Starts", 1, "count", metric_type=MetricTypes.COUNTER)

    def preprocess(self, data):
        metrics = self.context.metrics
        size = metrics.get_metric("Together", MetricTypes.GAUGE)
        size.add_or_update(len(data), [self.context.model_name])
        metrics.add_time(
            "Stage", 2.5, unit="ms", dimensions=[Dimension("Name", "read")],
            metric_type=MetricTypes.GAUGE,
        )
        return super().preprocess(data)

    def postprocess(self, data):
        self.context.metrics.add_percent("Share", 50, metric_type=MetricTypes.HISTOGRAM)
        return data.argmax(1).tolist()
"""
METRICS = """
dimensions:
  - &model_name "ModelName"
  - &level "Level"

ts_metrics:
  counter:
    - name: Requests2XX
      unit: Count
      dimensions: [*level, "Hostname"]

model_metrics:
  counter:
    - name: Starts
      unit: count
      dimensions: [*model_name, *level]
  gauge:
    - name: Together
      unit: count
      dimensions: [*model_name]
"""


def grey_picture(column):
    from PIL import Image

    picture = Image.new("L", (10, 10), 10)
    picture.paste(250, (column, 0, column + 1, 10))
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def server(start_server, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tutorial")
    declared = folder / "metrics.yaml"
    declared.write_text(METRICS)
    with start_server(
        preload_modules="torch", metrics_config=str(declared), model_metrics_auto_detect="true"
    ) as server:
        register(server, folder)
        yield server


def register(server, folder):
    (folder / "model.py").write_text(MODEL)
    torch.save({"weigh.weight": torch.full((1, 1, 10, 1), 0.1)}, folder / "weights.pt")
    archive = make_archive(
        server.store,
        HANDLER,
        "brightest",
        model_file=str(folder / "model.py"),
        serialized_file=str(folder / "weights.pt"),
    )
    answer = server.register(archive, initial_workers=1)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("column", [0, 7])
def test_a_grey_picture_stays_grey_for_a_handlers_own_transforms(server, column):
    answer = server.predict("brightest", data=grey_picture(column))
    assert (answer.status_code, answer.text) == (200, str(column))


def test_a_grey_picture_is_explained_pixel_by_pixel(server):
    answer = server.inference("POST", "/explanations/brightest", data=grey_picture(3))
    assert answer.status_code == 200, answer.text
    assert torch.tensor(answer.json()).shape == (1, 10, 10)


def test_a_declared_metric_can_be_fetched_before_anything_was_emitted(server):
    assert server.predict("brightest", data=grey_picture(3)).status_code == 200
    assert list(server.metrics("Together").values()) == [1.0]


def test_a_metric_emitted_while_the_model_loads_belongs_to_the_model(server):
    (series,) = server.metrics("Starts")
    assert 'ModelName="brightest",Level="Model"' in series


def test_metrics_that_nobody_declared_are_found(server):
    assert server.predict("brightest", data=grey_picture(3)).status_code == 200
    (stage,) = server.metrics("Stage")
    assert 'Name="read",ModelName="brightest",Level="Model"' in stage
    assert server.metrics("Share_count")
