"""From what a client sent to an RGB image, or to a sentence that says why there is none."""

import base64
import io

from PIL import Image, UnidentifiedImageError

from marserve.handlers.refusals import UnusableInput


class UnreadableImage(UnusableInput):
    """One request's input is no image that can be decoded; the text is for the client."""


def decode_image(encoded: bytes | bytearray | memoryview | str) -> Image.Image:
    """Decode an image file, in base64 if it is a str, and convert it to RGB if it is not.

    Grey, palette and transparent images have one, one and four channels, which no vision model
    expects; TorchServe let them fail in the model.

    Raises:
        UnreadableImage: It cannot be decoded, is cut short, or has too many pixels.
    """
    try:
        file = io.BytesIO(base64.b64decode(encoded) if isinstance(encoded, str) else encoded)
        image = Image.open(file)
        image.load()  # a file that is cut short shows it here, not in the transforms
        return image if image.mode == "RGB" else image.convert("RGB")
    except MemoryError:
        raise
    except UnidentifiedImageError:
        raise UnreadableImage("The input is not an image of a known format.") from None
    except Exception as error:  # decoders meet hostile bytes with every kind of error
        raise UnreadableImage(f"The image cannot be decoded: {error}") from error
