"""What is sent: files, or input made up."""

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

#: Bytes of a body that is sent.
MAX_BODY = 256 << 20
_UNKNOWN = "application/octet-stream"
_WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "is", "seen")


@dataclass(frozen=True)
class Payload:
    """A body and what it is, and the name of its file."""

    body: bytes
    content_type: str
    name: str = field(default="", compare=False)


def read_payloads(pattern: str) -> list[Payload]:
    """A file, the files of a directory, or those that a pattern finds, by name.

    Raises:
        BenchError: There are none, or one cannot be read.
    """
    paths = sorted(path for path in _found(pattern) if path.is_file())
    if not paths:
        raise BenchError(f"There is nothing to send: {pattern} is no file, and matches none.")
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
    """Make input up, always the same.

    Args:
        kind: One of `KINDS`, and after a colon how much: ``bytes:1024``, ``image:224x224``.
        number: Another one makes another input.

    Raises:
        BenchError: There is no such kind, or it cannot be made here.
    """
    name, _, amount = kind.partition(":")
    if name not in _MAKERS:
        raise BenchError(f"Nobody knows how to generate {name!r}: it is one of {KINDS}.")
    make, usual = _MAKERS[name]
    numbers = re.fullmatch(r"([1-9]\d{0,8})(?:x([1-9]\d{0,4}))?", amount or usual, re.ASCII)
    if numbers is None or (numbers[2] is not None) != ("x" in usual):
        raise BenchError(f"--generate {kind}: what it needs looks like {name}:{usual}.")
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
    """In the protocol of KServe's second version, which is Triton's."""
    values = random.Random(seed)  # noqa: S311  no secret
    data = [round(values.uniform(-1, 1), 4) for _ in range(numbers)]
    tensor = {"name": "input-0", "shape": [1, numbers], "datatype": "FP32", "data": data}
    return Payload(json.dumps({"inputs": [tensor]}).encode(), "application/json")


def _image(seed: int, width: int, height: int) -> Payload:
    try:
        # By name at run time: the server has no edge to pillow.
        image = importlib.import_module("PIL.Image")
    except ImportError:
        raise BenchError("--generate image needs pillow: pip install pillow.") from None
    # Noise, but coarse: fine noise makes files, and decoding times, that no photograph has.
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
#: What can be generated, and how much of it by default.
KINDS = ", ".join(f"{name}:{usual}" for name, (_, usual) in _MAKERS.items())
