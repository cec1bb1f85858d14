"""Image files: decoding, conversion to RGB, samples.

`decode_image` keeps the file's mode, because channels and depth that a model expects depend on its
`image_processing`. Those of the built-in handlers begin with `to_rgb`.
"""

import base64
import io
import random
from typing import Any

from PIL import Image, UnidentifiedImageError

from marserve.handlers.refusals import UnusableInput

SAMPLE_SIZE = 500, 375  # the most frequent of ImageNet
_SAMPLE_PATCHES = 40, 30
_DEEP_MODES = ("I;16", "I;16B", "I;16L", "I")  # older versions of PIL open 16 bits as the last


def decode_image(encoded: bytes | bytearray | memoryview | str) -> Image.Image:
    """Decode an image file, in base64 if it is a str, or raise UnusableInput; keep its mode."""
    try:
        file = io.BytesIO(base64.b64decode(encoded) if isinstance(encoded, str) else encoded)
        image = Image.open(file)
        image.load()  # raises for incomplete files, here and not in the transforms
        return image
    except MemoryError:
        raise
    except UnidentifiedImageError:
        raise UnusableInput("The input is not an image of a known format.") from None
    except Exception as error:  # hostile bytes raise anything
        raise UnusableInput(f"The image cannot be decoded: {error}") from error


def to_rgb(image: Any) -> Any:
    """Convert a PIL image to RGB; return other objects unchanged.

    Of 16 bits the upper eight are kept; PIL would clip values above 255.
    """
    if not isinstance(image, Image.Image) or image.mode == "RGB":
        return image
    if image.mode in _DEEP_MODES:
        return image.convert("I").point(lambda value: value * (1 / 257)).convert("RGB")
    return image.convert("RGB")


def sample_image(number: int = 0, size: tuple[int, int] = SAMPLE_SIZE) -> bytes:
    """Return a JPEG file of soft shapes that takes as long to decode as a photograph.

    ``size`` is its width and height in pixels.
    """
    noise = random.Random(number)  # noqa: S311 - a picture, not a secret
    shapes = _noise(noise, _SAMPLE_PATCHES).resize(size, Image.Resampling.BICUBIC)
    file = io.BytesIO()
    Image.blend(shapes, _noise(noise, size), 0.1).save(file, "JPEG", quality=90)
    return file.getvalue()


def _noise(source: random.Random, size: tuple[int, int]) -> Image.Image:
    width, height = size
    return Image.frombytes("RGB", size, source.randbytes(width * height * 3))
