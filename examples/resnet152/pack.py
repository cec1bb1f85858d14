"""Everything that goes into resnet-152.mar, and whether one that exists is still good.

Weights: torchvision's, from torch's download cache or the network; without either, random ones with
a fixed seed. Of torchvision's two sets it is V1, because the pictures it was trained for are cut
the way the built-in image_classifier cuts them.
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

_SEED = 12  # with it, the two photographs are not of the same class
_CONTRAST = 40.0  # as torch starts it, the last layer gives all 1000 classes the same 0.1 %
_WEIGHTS_NOTE = "weights.txt"  # in the archive, for the next run of the demo
_SILENCE = 5.0  # seconds without a byte until the network counts as absent


def packed_weights(archive: Path) -> str | None:
    """Which weights an archive of this demo holds; None if it must be packed (again).

    Raises:
        DemoFailed: Somebody else's archive has the name.
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
    """Write what the archive is made of, beside the model file.

    Args:
        folder: Where the parts go.
        download: Whether to look for torchvision's weights.

    Returns:
        `TRAINED` or `RANDOM`.
    """
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    trained = _download() if download else None
    torch.save(_random_weights() if trained is None else trained, folder / "resnet152.pth")
    weights = RANDOM if trained is None else TRAINED
    (folder / "index_to_name.json").write_text(json.dumps(class_names(), indent=1))
    (folder / _WEIGHTS_NOTE).write_text(weights)
    return weights


def archiver_command(folder: Path, store: Path) -> list[str]:
    """The command that makes the archive of the parts. Weights hardly compress: they are stored."""
    names, weights, note = (
        readable(folder / name) for name in ("index_to_name.json", "resnet152.pth", _WEIGHTS_NOTE)
    )
    return [
        *("torch-model-archiver", "--model-name", MODEL_NAME, "--version", "1.0"),
        *("--model-file", readable(MODEL_FILE), "--serialized-file", weights),
        *("--handler", "image_classifier", "--extra-files", f"{names},{note}"),
        *("--archive-format", "zip-store", "--export-path", readable(store), "--force"),
    ]


def class_names() -> dict[str, str]:
    """ImageNet's names from torchvision's metadata, by index as text; no two are equal.

    An answer is a dict by name, so the two cranes (a bird, a machine) need their number.
    """
    from torchvision.models import ResNet152_Weights

    names = ResNet152_Weights.IMAGENET1K_V1.meta["categories"]
    uses = Counter(names)
    return {
        str(index): name if uses[name] == 1 else f"{name} ({index})"
        for index, name in enumerate(names)
    }


def _download() -> object | None:
    """The state dict from torchvision; None if it cannot be had soon."""
    from torchvision.models import ResNet152_Weights

    patience = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_SILENCE)
    try:
        return ResNet152_Weights.IMAGENET1K_V1.get_state_dict(progress=True, check_hash=True)
    except (OSError, RuntimeError) as error:  # no network; a damaged download
        print(f"torchvision's weights cannot be downloaded ({error}).")
        return None
    finally:
        socket.setdefaulttimeout(patience)


def _random_weights() -> object:
    import torch
    from model import ResNet152

    torch.manual_seed(_SEED)
    weights = ResNet152().state_dict()
    weights["fc.weight"] *= _CONTRAST
    return weights
