"""The built-in image classifier, with a model that sees only how bright a picture is."""

import io
import json
import warnings

import pytest

pytestmark = pytest.mark.integration

torch = pytest.importorskip("torch")
pytest.importorskip("torchvision")


class Brightness(torch.nn.Module):
    """Three classes: dark, middling, bright."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        mean = images.mean(dim=[1, 2, 3])
        return torch.stack([-10 * mean, 5 - 20 * mean.abs(), 10 * mean], dim=1)


def picture(shade, mode="L"):
    from PIL import Image

    file = io.BytesIO()
    Image.new(mode, (300, 200), shade).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module", params=["false", "true"])
def server(request, share_server, tmp_path_factory, make_archive):
    """One model; its stages overlap, or do not: nobody should see that in the answers."""
    files = tmp_path_factory.mktemp("model")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*torch.jit")  # TorchScript is what archives hold
        torch.jit.script(Brightness()).save(str(files / "model.pt"))
    names = {"0": "dark", "1": "middling", "2": ["n02", "bright"]}
    (files / "index_to_name.json").write_text(json.dumps(names))
    with share_server(preload_modules="torch") as server:
        archive = make_archive(
            server.store,
            "image_classifier",
            "shades",
            f"overlapStages: {request.param}\n",
            serialized_file=str(files / "model.pt"),
            extra_files=str(files / "index_to_name.json"),
        )
        query = {"initial_workers": 1, "batch_size": 4, "max_batch_delay": 60_000}
        answer = server.register(archive, **query)
        assert answer.status_code == 200, answer.text
        yield server


def best(answer):
    assert answer.status_code == 200, answer.text
    shares = json.loads(answer.text)
    assert list(shares.values()) == sorted(shares.values(), reverse=True)
    assert sum(shares.values()) == pytest.approx(1)
    return next(iter(shares))


def send(server, bodies, together):
    return together(
        [lambda b=b: server.inference("PUT", "/predictions/shades", data=b) for b in bodies]
    )


def test_a_batch_of_pictures(server, together):
    bodies = [picture(0), picture(255), picture(120), picture((255, 255, 255, 255), "RGBA")]
    answers = send(server, bodies, together)
    assert [best(answer) for answer in answers] == ["dark", "bright", "middling", "bright"]


@pytest.mark.parametrize(
    "junk",
    [b"no picture", b"", picture(0)[:60], b"\x89PNG\r\n\x1a\n" + b"x" * 99],
    ids=["text", "empty", "cut short", "broken"],
)
def test_what_is_no_picture_costs_only_its_own_request(server, together, junk):
    bodies = [picture(0), junk, picture(255), picture(120)]
    dark, refused, bright, middling = send(server, bodies, together)
    assert [best(answer) for answer in (dark, bright, middling)] == ["dark", "bright", "middling"]
    assert refused.status_code == 400
    assert refused.headers["content-type"] == "application/json"
    assert list(refused.json()) == ["code", "type", "message"]
    assert (refused.json()["code"], refused.json()["type"]) == (400, "BadRequestException")


def test_a_batch_without_any_picture(server, together):
    answers = send(server, [b"junk"] * 4, together)
    assert [answer.status_code for answer in answers] == [400] * 4


def test_a_tensor_as_result(server):
    source = """
import torch
def handle(data, context):
    return data and [torch.ones(3)] * len(data)
"""
    server.install(source, "tensor")
    result = torch.load(io.BytesIO(server.predict("tensor").content), weights_only=True)
    assert result.tolist() == [1, 1, 1]


def test_what_the_base_handler_reports(server, together):
    send(server, [picture(0)] * 4, together)
    (series,) = [
        metric for metric in server.metrics("HandlerTime") if 'ModelName="shades"' in metric
    ]
    assert 'Level="Model"' in series


def test_the_size_of_batches_is_found_with_a_picture_of_the_handlers_own(server):
    query = {"model_name": "measured", "initial_workers": 1, "batch_size": "auto"}
    answer = server.register("shades.mar", **query)
    assert answer.status_code == 200, answer.text
    described = server.describe("measured")
    batching = described["batching"]
    assert len(batching["costs"]["points"]) > 1
    assert described["batchSize"] == batching["size"]
    expected = "times the throughput of size 1" if batching["size"] > 1 else "does not pay"
    assert expected in batching["why"]
    assert best(server.inference("PUT", "/predictions/measured", data=picture(0))) == "dark"
    assert server.management("DELETE", "/models/measured").status_code == 200
