"""ResNet-152 as an eager model; the archive contains this file and the weights."""

from torchvision.models.resnet import Bottleneck, ResNet


class ResNet152(ResNet):
    """torchvision's ``resnet152``, without arguments, for the archive's state dict.

    Random weights of each block's last norm are zero: the output of 50 untrained blocks would grow
    without limit.
    """

    def __init__(self) -> None:
        super().__init__(Bottleneck, [3, 8, 36, 3], zero_init_residual=True)
