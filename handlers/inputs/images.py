"""From what a client sent to an image, or to a sentence that says why there is none.

A picture is decoded and nothing more: how many channels of which depth a model wants is known where
its `image_processing` is written. Those of the ready-made handlers begin with `to_rgb`.
"""

import base64
import io
import random
from typing import Any

from PIL import Image, UnidentifiedImageError

from marserve.handlers.refusals import UnusableInput

_SAMPLE_SIZE = 500, 375  # ImageNet's most frequent
_SAMPLE_PATCHES = 40, 30
_DEEP_MODES = ("I;16", "I;16B", "I;16L", "I")  # the last: such files in older versions of PIL


class UnreadableImage(UnusableInput):
    """One request's input is no image that can be decoded; the text is for the client."""


def decode_image(encoded: bytes | bytearray | memoryview | str) -> Image.Image:
    """Decode an image file, in base64 if it is a str; its mode is the file's.

    Raises:
        UnreadableImage: It cannot be decoded, is cut short, or has too many pixels.
    """
    try:
        file = io.BytesIO(base64.b64decode(encoded) if isinstance(encoded, str) else encoded)
        image = Image.open(file)
        image.load()  # a file that is cut short shows it here, not in the transforms
        return image
    except MemoryError:
        raise
    except UnidentifiedImageError:
        raise UnreadableImage("The input is not an image of a known format.") from None
    except Exception as error:  # decoders meet hostile bytes with every kind of error
        raise UnreadableImage(f"The image cannot be decoded: {error}") from error


def to_rgb(image: Any) -> Any:
    """Convert an image of another mode to RGB; the first step of an ``image_processing``.

    Grey, palette and transparent images have one, one and four channels, which no model of
    photographs expects; TorchServe let them fail in the model. Of 16 bits the upper eight stay,
    where PIL would make everything from 256 on white. What is no PIL image is left as it is.
    """
    if not isinstance(image, Image.Image) or image.mode == "RGB":
        return image
    if image.mode in _DEEP_MODES:
        return image.convert("I").point(lambda value: value * (1 / 257)).convert("RGB")
    return image.convert("RGB")


def sample_image(number: int = 0) -> bytes:
    """Make a JPEG file that costs what a photograph does: soft shapes with a little grain.

    500 x 375 pixels of three channels, the same ones each time; with another number, others.
    """
    noise = random.Random(number)  # noqa: S311 - a picture, not a secret
    shapes = _noise(noise, _SAMPLE_PATCHES).resize(_SAMPLE_SIZE, Image.Resampling.BICUBIC)
    file = io.BytesIO()
    Image.blend(shapes, _noise(noise, _SAMPLE_SIZE), 0.1).save(file, "JPEG", quality=90)
    return file.getvalue()


def _noise(source: random.Random, size: tuple[int, int]) -> Image.Image:
    width, height = size
    return Image.frombytes("RGB", size, source.randbytes(width * height * 3))
