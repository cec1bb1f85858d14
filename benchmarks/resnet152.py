"""ResNet-152 with seeded random weights as a model directory, and a photograph to send.

Speed does not depend on what the weights are, so nothing is downloaded. The photograph ships with
scikit-learn.
"""

import json
from pathlib import Path

import sklearn.datasets
import torch
from processes import pack
from safetensors.torch import save_file
from torchvision.models import ResNet152_Weights, resnet152

NAME = "resnet-152"
WEIGHTS_SUFFIX = ".pth"
WEIGHTS = f"resnet152{WEIGHTS_SUFFIX}"
PHOTOGRAPH = Path(sklearn.datasets.__file__).with_name("images") / "flower.jpg"

_MODEL_FILE = """\
from torchvision.models.resnet import Bottleneck, ResNet


class ResNet152(ResNet):
    def __init__(self) -> None:
        super().__init__(Bottleneck, [3, 8, 36, 3])
"""


def pack_resnet(
    directory: Path,
    config: str = "",
    *,
    name: str = NAME,
    suffix: str = WEIGHTS_SUFFIX,
    archive_format: str = "no-archive",
) -> Path:
    """Write the model into ``directory/store``; returns what it would be as a model directory.

    Args:
        directory: The workplace.
        config: Its model-config.yaml.
        name: The model's.
        suffix: Of the file of weights: ``.pth``, or ``.safetensors``.
        archive_format: As the archiver takes it.
    """
    torch.manual_seed(0)
    weights, model_file = directory / f"resnet152{suffix}", directory / "model.py"
    names, config_file = directory / "index_to_name.json", directory / "model-config.yaml"
    config_file.write_text(config, encoding="utf-8")
    categories = ResNet152_Weights.DEFAULT.meta["categories"]
    names.write_text(json.dumps(dict(enumerate(categories))), encoding="utf-8")
    # Residual branches start at zero: else fifty of them overflow without trained statistics.
    save = save_file if suffix == ".safetensors" else torch.save
    save(resnet152(zero_init_residual=True).state_dict(), weights)
    model_file.write_text(_MODEL_FILE, encoding="utf-8")
    pack(
        directory / "store",
        {
            "model-name": name,
            "model-file": model_file,
            "serialized-file": weights,
            "handler": "image_classifier",
            "extra-files": names,
            "config-file": config_file,
            "archive-format": archive_format,
        },
    )
    return directory / "store" / name
