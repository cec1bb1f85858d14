"""The bodies of requests: files, or generated input."""

import glob
import importlib
import io
import json
import mimetypes
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from marserve.tools.bench.errors import BenchError
from marserve.tools.files import read_file

#: Largest body, bytes.
MAX_BODY = 256 << 20
_UNKNOWN = "application/octet-stream"
_WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "is", "seen")


@dataclass(frozen=True)
class Payload:
    """The body of a request, its content type, and the name of its file."""

    body: bytes
    content_type: str
    name: str = field(default="", compare=False)


def read_payloads(pattern: str) -> list[Payload]:
    """Read a file, the files of a directory, or those that match a pattern, sorted by path.

    Raises:
        BenchError: No file matches, or one cannot be read.
    """
    paths = sorted(path for path in _found(pattern) if path.is_file())
    if not paths:
        raise BenchError(f"There is nothing to send: no file has the name or pattern {pattern}.")
    try:
        return [Payload(read_file(path, MAX_BODY), _type_of(path), path.name) for path in paths]
    except OSError as error:
        raise BenchError(f"Cannot read {error.filename}: {error.strerror}.") from None


def _found(pattern: str) -> Sequence[Path]:
    path = Path(pattern)
    if path.is_dir():
        return [item for item in path.iterdir() if not item.name.startswith(".")]
    return [path] if path.is_file() else [Path(item) for item in glob.glob(pattern)]  # noqa: PTH207  also absolute


def _type_of(path: Path) -> str:
    return mimetypes.guess_type(path.name)[0] or _UNKNOWN


def generate_payload(kind: str, number: int = 0) -> Payload:
    """Generate input; equal arguments give equal input.

    Args:
        kind: One of `KINDS`, with a size after a colon: ``bytes:1024``, ``image:224x224``.
        number: Seed of the input.

    Raises:
        BenchError: The kind is unknown, the size is malformed, or a package is missing.
    """
    name, _, amount = kind.partition(":")
    if name not in _MAKERS:
        raise BenchError(f"--generate {name!r} is unknown: it is one of {KINDS}.")
    make, usual = _MAKERS[name]
    numbers = re.fullmatch(r"([1-9]\d{0,8})(?:x([1-9]\d{0,4}))?", amount or usual, re.ASCII)
    if numbers is None or (numbers[2] is not None) != ("x" in usual):
        raise BenchError(f"--generate {kind}: the expected format is {name}:{usual}.")
    return make(number, *(int(group) for group in numbers.groups() if group))


def _bytes(seed: int, length: int) -> Payload:
    return Payload(random.Random(seed).randbytes(length), _UNKNOWN)  # noqa: S311  no secret


def _text(first: int, words: int) -> Payload:
    text = " ".join(_WORDS[index % len(_WORDS)] for index in range(first, first + words))
    return Payload(text.encode(), "text/plain")


def _json(seed: int, numbers: int) -> Payload:
    values = random.Random(seed)  # noqa: S311  no secret
    data = [round(values.uniform(-1, 1), 4) for _ in range(numbers)]
    return Payload(json.dumps({"data": data}).encode(), "application/json")


def _tensor(seed: int, numbers: int) -> Payload:
    """Return a request of KServe's protocol version 2, which Triton uses."""
    values = random.Random(seed)  # noqa: S311  no secret
    data = [round(values.uniform(-1, 1), 4) for _ in range(numbers)]
    tensor = {"name": "input-0", "shape": [1, numbers], "datatype": "FP32", "data": data}
    return Payload(json.dumps({"inputs": [tensor]}).encode(), "application/json")


def _image(seed: int, width: int, height: int) -> Payload:
    try:
        # Imported by name: the server does not depend on pillow.
        image = importlib.import_module("PIL.Image")
    except ImportError:
        raise BenchError("--generate image needs pillow: pip install pillow.") from None
    # Coarse noise: fine noise has larger files and longer decoding times than photographs.
    coarse = image.frombytes("RGB", (16, 16), random.Random(seed).randbytes(768))  # noqa: S311
    encoded = io.BytesIO()
    coarse.resize((width, height), image.Resampling.BICUBIC).save(encoded, "JPEG", quality=90)
    return Payload(encoded.getvalue(), "image/jpeg")


_MAKERS: dict[str, tuple[Callable[..., Payload], str]] = {
    "bytes": (_bytes, "1024"),
    "text": (_text, "32"),
    "json": (_json, "16"),
    "tensor": (_tensor, "16"),
    "image": (_image, "224x224"),
}
#: The kinds of generated input, with their default sizes.
KINDS = ", ".join(f"{name}:{usual}" for name, (_, usual) in _MAKERS.items())
