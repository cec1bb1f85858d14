"""ResNet-152 as an eager model: the archive carries this file beside the weights."""

from torchvision.models.resnet import Bottleneck, ResNet


class ResNet152(ResNet):
    """The network that torchvision calls ``resnet152``, built without arguments.

    The handler builds it and loads the archive's state dict into it. Where the weights stay random,
    the end of every block starts at zero: 50 blocks of untrained noise on top of each other would
    grow beyond any sensible number.
    """

    def __init__(self) -> None:
        super().__init__(Bottleneck, [3, 8, 36, 3], zero_init_residual=True)
