"""A network that has learnt digits, served faster: it still knows them, or it is not served."""

import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.integration

torch = pytest.importorskip("torch")
pytest.importorskip("torchvision")
datasets = pytest.importorskip("sklearn.datasets")

MODEL = """
from torch import nn

class DigitNet(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(32 * 2 * 2, 10),
        )
"""
HANDLER = """
from torchvision import transforms
from ts.torch_handler.vision_handler import VisionHandler

class Digits(VisionHandler):
    image_processing = transforms.Compose([transforms.Grayscale(), transforms.ToTensor()])

    def postprocess(self, data):
        assert str(data.dtype) == "torch.float32"
        return data.argmax(1).tolist()
"""
COUNTING = HANDLER.replace(
    "return data.argmax(1).tolist()",
    """
        import torch
        compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        return [[digit, compiled] for digit in data.argmax(1).tolist()]
""".strip(),
)
FASTER = """
sampleInput: 0.png
optimization:
  precision: bf16
  channels_last: true
  fold_batch_norm: true
  check_accuracy: {max_relative_error: 0.05, min_agreement: 0.9, samples: [0.png, 1.png]}
"""


@dataclass
class Digits:
    """What was trained, on what, and files for archives.

    Attributes:
        images: PNG files that the network has not seen.
        labels: What is on them.
        offline: What the network says in fp32.
        files: Options of the archive maker.
    """

    images: list[bytes]
    labels: list[int]
    offline: list[int]
    files: dict[str, str]


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    from PIL import Image

    folder = tmp_path_factory.mktemp("digits")
    (folder / "digit_net.py").write_text(MODEL)
    data = datasets.load_digits()
    pixels = torch.from_numpy(data.images * 255 // 16).to(torch.uint8)
    labels = torch.from_numpy(data.target)
    x = pixels.unsqueeze(1).float() / 255
    network = trained(x[:1500], labels[:1500])
    torch.save(network.state_dict(), folder / "digits.pth")
    images = []
    for place, pixel in enumerate(pixels[1500:1600]):
        file = io.BytesIO()
        Image.fromarray(pixel.numpy()).save(file, "PNG")
        images.append(file.getvalue())
        (folder / f"{place}.png").write_bytes(images[-1])
    with torch.inference_mode():
        offline = network(x[1500:1600]).argmax(1).tolist()
    files = {
        "model_file": str(folder / "digit_net.py"),
        "serialized_file": str(folder / "digits.pth"),
        "extra_files": ",".join(str(folder / f"{place}.png") for place in range(2)),
    }
    return Digits(images, labels[1500:1600].tolist(), offline, files)


def trained(x: torch.Tensor, labels: torch.Tensor) -> torch.nn.Module:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so small that a second thread only waits
    torch.manual_seed(0)
    names: dict[str, type[torch.nn.Module]] = {}
    exec(MODEL, names)
    network = names["DigitNet"]()
    optimizer = torch.optim.Adam(network.parameters(), lr=0.005)
    for _ in range(4):
        for rows in torch.randperm(len(x)).split(64):
            loss = torch.nn.functional.cross_entropy(network(x[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    torch.set_num_threads(threads)
    return network.eval()


@pytest.fixture(scope="module")
def server(start_server, tmp_path_factory):
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path_factory.mktemp("inductor"))}
    with start_server(environment=cache, preload_modules="torch") as server:
        yield server


def ask_all(server, together, model: str, images: list[bytes]) -> list[Any]:
    def ask(image: bytes) -> Any:
        answer = server.predict(model, data=image)
        assert answer.status_code == 200, answer.text
        return answer.json()

    found = []
    for start in range(0, len(images), 10):
        some = images[start : start + 10]
        found += together([lambda image=image: ask(image) for image in some])
    return found


def part_equal(some: list[int], others: list[int]) -> float:
    return sum(map(int.__eq__, some, others)) / len(others)


@pytest.fixture
def serve(server, make_archive, digits):
    """Register the network under a name, with this model-config.yaml."""

    def register(name, config):
        archive = make_archive(server.store, HANDLER, name, config, **digits.files)
        registered = server.register(archive, initial_workers=1, batch_size=8, max_batch_delay=20)
        assert registered.status_code == 200, registered.text

    return register


def test_the_faster_network_knows_the_digits(server, serve, together, digits):
    serve("faster", FASTER)
    answers = ask_all(server, together, "faster", digits.images)
    assert part_equal(answers, digits.offline) >= 0.98
    assert part_equal(answers, digits.labels) >= 0.9
    server.wait_logged("model_log.log", "Against fp32: relative error 0.0")
    described = server.management("GET", "/models/faster", params={"customized": "true"})
    metadata = described.json()[0]["customizedMetadata"]["optimization"]
    assert (metadata["precision"], metadata["fold_batch_norm"]) == ("bf16", True)
    assert 0 < metadata["accuracy"]["relative_error"] <= 0.05


@pytest.mark.parametrize(
    "config",
    [
        "",
        FASTER,
        FASTER.replace("bf16", "fp16"),
        "sampleInput: 0.png\ncompiledBatchSizes: [2, 8]\noptimization: {cuda_graphs: true}\n",
        "overlapStages: true\n",
        "overlapStages: true\noptimization: {device_stages: ['cuda:0', 'cuda:0']}\n",
        "sampleInput: 0.png\ncompiledBatchSizes: [8]\npt2: {compile: {enable: true}}\n",
    ],
)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_network_knows_the_digits_on_a_gpu(server, serve, together, digits, config):
    serve("on-gpu", config)
    answers = ask_all(server, together, "on-gpu", digits.images)
    assert part_equal(answers, digits.offline) >= 0.98
    assert server.worker("on-gpu")["gpu"] is True
    server.unregister_all()


def test_compiled_sizes_are_run_before_the_worker_is_ready(server, make_archive, together, digits):
    config = "sampleInput: 0.png\ncompiledBatchSizes: [2, 4]\npt2: {compile: {backend: aot_eager}}"
    archive = make_archive(server.store, COUNTING, "compiled", config, **digits.files)
    assert server.register(archive, initial_workers=1).status_code == 200
    for size in (2, 4):
        server.wait_logged("model_log.log", f"Batch size {size}: first run")
    answers = ask_all(server, together, "compiled", digits.images[:20])
    assert [digit for digit, _ in answers] == digits.offline[:20]
    assert {compiled for _, compiled in answers} == {2}
    [worker] = server.management("GET", "/models/compiled").json()[0]["workers"]
    assert (worker["compiled"]["backend"], worker["compiled"]["dynamic"]) == ("aot_eager", False)
    assert [(each["size"], each["graphs"]) for each in worker["compiled"]["sizes"]] == [
        (2, 1),
        (4, 1),
    ]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (("bf16", "int4"), "optimization.precision is one of fp32, bf16, fp16, not 'int4'."),
        (("channels_last", "channel_last"), "optimization has no 'channel_last'; it has precision"),
        (
            ("max_relative_error: 0.05", "max_relative_error: 1.0e-6"),
            "against fp32, the relative error is 0.00",
        ),
        (("channels_last: true", "cuda_graphs: true"), "cuda_graphs needs a CUDA device"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_what_cannot_be_done_fails_the_registration(server, make_archive, digits, change, sentence):
    archive = make_archive(
        server.store, HANDLER, "refused", FASTER.replace(*change), **digits.files
    )
    answer = server.register(archive, initial_workers=1)
    assert answer.status_code >= 400
    assert sentence in json.dumps(answer.json(), ensure_ascii=False)
    assert not server.is_known("refused")
    Path(archive).unlink()
