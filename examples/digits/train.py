"""Trains a small network on scikit-learn's digits and packs it in two forms.

build/digits/digits.pth            state dict, for the archive digits-eager.mar
build/digits/digits.pt             TorchScript, for the archive digits-script.mar
build/digits/held_out/0000.png …   images that were not used for training
build/digits/held_out.json         their digits and the network's predictions
"""

import argparse
import json
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from model import DigitNet
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

from marserve.tools.archiver.archiver import generate_model_archive
from marserve.tools.archiver.config import ModelArchiverConfig

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

_REQUIRED_ACCURACY = 0.97
_EPOCHS = 12
_BATCH = 64
_WHITE = 16  # the brightest pixel in scikit-learn's digits


@dataclass(frozen=True)
class Digits:
    """Images and their labels.

    Attributes:
        pixels: Grey values from 0 to 255, shape ``(n, 8, 8)``.
        labels: The digits, shape ``(n,)``.
    """

    pixels: torch.Tensor
    labels: torch.Tensor

    @property
    def images(self) -> torch.Tensor:
        """The network's input, shape ``(n, 1, 8, 8)``: equal to ToTensor's result for a PNG."""
        return self.pixels.unsqueeze(1).to(torch.float32).div(255)


def main() -> int:
    """Train, write the files and pack; return 1 if the accuracy is too low."""
    options = _parse_options()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # a second thread would only delay operations this small
    training, held_out = split()
    network = train(training)
    predictions = network.classify(held_out.images)
    accuracy = (predictions == held_out.labels).double().mean().item()
    print(f"{len(held_out.labels)} held-out images, offline accuracy {accuracy:.2%}")
    write_network(network, options.build_dir)
    write_held_out(held_out, predictions, options.build_dir)
    for archive in pack(options.build_dir, options.model_store):
        print(f"packed {archive}")
    return 0 if accuracy >= _REQUIRED_ACCURACY else 1


def split() -> tuple[Digits, Digits]:
    """Return the training images and the held-out fifth, always the same."""
    data = load_digits()
    pixels = torch.from_numpy(data.images * 255 // _WHITE).to(torch.uint8)
    labels = torch.from_numpy(data.target)
    learn, hold = train_test_split(
        range(len(labels)), test_size=0.2, random_state=0, stratify=data.target
    )
    return Digits(pixels[learn], labels[learn]), Digits(pixels[hold], labels[hold])


def train(digits: Digits) -> DigitNet:
    """Return a trained network in evaluation mode."""
    network = DigitNet()
    optimizer = torch.optim.Adam(network.parameters(), lr=0.005)
    images = digits.images
    for _ in range(_EPOCHS):
        for rows in torch.randperm(len(images)).split(_BATCH):
            loss = nn.functional.cross_entropy(network(images[rows]), digits.labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return network.eval()


def write_network(network: DigitNet, folder: Path) -> None:
    """Write the network in both forms."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(network.state_dict(), folder / "digits.pth")
    with warnings.catch_warnings():
        # TorchScript is deprecated, but many archives contain it.
        warnings.filterwarnings("ignore", ".*torch.jit")
        torch.jit.trace(network, torch.zeros(1, 1, 8, 8)).save(str(folder / "digits.pt"))


def write_held_out(digits: Digits, predictions: torch.Tensor, folder: Path) -> None:
    """Write the images as PNG files, their labels and the predictions."""
    images = folder / "held_out"
    images.mkdir(exist_ok=True)
    for index, pixels in enumerate(digits.pixels):
        Image.fromarray(pixels.numpy()).save(images / f"{index:04}.png")
    truth = {"digits": digits.labels.tolist(), "offline": predictions.tolist()}
    (folder / "held_out.json").write_text(json.dumps(truth))


def pack(folder: Path, store: Path) -> list[Path]:
    """Pack both forms with the same handler; README.md shows the commands."""
    weights = {
        "digits-eager": {
            "model_file": str(HERE / "model.py"),
            "serialized_file": str(folder / "digits.pth"),
        },
        "digits-script": {"serialized_file": str(folder / "digits.pt")},
    }
    return [
        generate_model_archive(
            ModelArchiverConfig(
                model_name=name,
                version="1.0",
                handler=str(HERE / "handler.py"),
                export_path=str(store),
                force=True,
                **files,
            )
        )
        for name, files in weights.items()
    ]


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--build-dir", type=Path, default=ROOT / "build" / "digits", metavar="DIR")
    parser.add_argument("--model-store", type=Path, default=ROOT / "model_store", metavar="DIR")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
