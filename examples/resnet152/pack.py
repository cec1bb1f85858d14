"""The parts of resnet-152.mar, and the check whether an existing archive is current.

The weights are torchvision's IMAGENET1K_V1, from torch's cache or the network, else random with a
fixed seed. V1 was trained with the crop of the built-in image_classifier.
"""

import json
import socket
import zipfile
from collections import Counter
from pathlib import Path

from terminal import DemoFailed, readable

MODEL_NAME = "resnet-152"
MODEL_FILE = Path(__file__).with_name("model.py")
TRAINED = "torchvision IMAGENET1K_V1"
RANDOM = "random, seed 12"

_SEED = 12  # the two photographs get different classes
_CONTRAST = 40.0  # with torch's initial last layer all 1000 classes have 0.1 %
_WEIGHTS_NOTE = "weights.txt"  # in the archive, for the next run of the demo
_SILENCE = 5.0  # seconds without a byte until the download is given up


def packed_weights(archive: Path) -> str | None:
    """Return the kind of weights in an archive; None if it is missing or outdated.

    Raises:
        DemoFailed: The archive is not of this demo.
    """
    if not archive.is_file():
        return None
    try:
        with zipfile.ZipFile(archive) as members:
            weights = members.read(_WEIGHTS_NOTE).decode()
            packed_model = members.read(MODEL_FILE.name)
    except (zipfile.BadZipFile, KeyError):
        raise DemoFailed(
            f"{archive} was not packed by this demo, which would overwrite it. Move it away."
        ) from None
    is_current = weights in (TRAINED, RANDOM) and packed_model == MODEL_FILE.read_bytes()
    return weights if is_current else None


def write_parts(folder: Path, *, download: bool) -> str:
    """Write the parts of the archive, except the model file; return `TRAINED` or `RANDOM`."""
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    trained = _download() if download else None
    torch.save(_random_weights() if trained is None else trained, folder / "resnet152.pth")
    weights = RANDOM if trained is None else TRAINED
    (folder / "index_to_name.json").write_text(json.dumps(class_names(), indent=1))
    (folder / _WEIGHTS_NOTE).write_text(weights)
    return weights


def archiver_command(folder: Path, store: Path) -> list[str]:
    """Return the archiver's command, without compression, which weights hardly gain from."""
    names, weights, note = (
        readable(folder / name) for name in ("index_to_name.json", "resnet152.pth", _WEIGHTS_NOTE)
    )
    return [
        "torch-model-archiver",
        "--model-name",
        MODEL_NAME,
        "--version",
        "1.0",
        "--model-file",
        readable(MODEL_FILE),
        "--serialized-file",
        weights,
        "--handler",
        "image_classifier",
        "--extra-files",
        f"{names},{note}",
        "--archive-format",
        "zip-store",
        "--export-path",
        readable(store),
        "--force",
    ]


def class_names() -> dict[str, str]:
    """Return ImageNet's names by index as text; equal names (two cranes) get their index.

    An answer is a dict by name.
    """
    from torchvision.models import ResNet152_Weights

    names = ResNet152_Weights.IMAGENET1K_V1.meta["categories"]
    uses = Counter(names)
    return {
        str(index): name if uses[name] == 1 else f"{name} ({index})"
        for index, name in enumerate(names)
    }


def _download() -> object | None:
    """Return torchvision's state dict; None if it cannot be downloaded."""
    from torchvision.models import ResNet152_Weights

    timeout = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_SILENCE)
    try:
        return ResNet152_Weights.IMAGENET1K_V1.get_state_dict(progress=True, check_hash=True)
    except (OSError, RuntimeError) as error:  # no network; a damaged download
        print(f"torchvision's weights cannot be downloaded ({error}).")
        return None
    finally:
        socket.setdefaulttimeout(timeout)


def _random_weights() -> object:
    import torch
    from model import ResNet152

    torch.manual_seed(_SEED)
    weights = ResNet152().state_dict()
    weights["fc.weight"] *= _CONTRAST
    return weights
