"""Compares a running server's predictions for the held-out split with those of train.py.

Both archives are tested with batch sizes 1 and 16. The exit status is 0 only if all predictions
are equal, and with them the accuracy.
"""

import argparse
import json
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import requests

ARCHIVES = ("digits-eager", "digits-script")
BATCH_SIZES = (1, 16)

_BUILD = Path(__file__).resolve().parents[2] / "build" / "digits"
_MAX_BATCH_DELAY_MS = 50
_TIMEOUT = 60.0  # seconds


@dataclass(frozen=True)
class HeldOut:
    """The images that were not used for training.

    Attributes:
        images: PNG files.
        digits: Their labels.
        offline: The network's predictions without a server.
    """

    images: Sequence[bytes]
    digits: Sequence[int]
    offline: Sequence[int]

    @classmethod
    def read(cls, folder: Path) -> "HeldOut":
        """Read the files of train.py."""
        truth = json.loads((folder / "held_out.json").read_text())
        files = sorted((folder / "held_out").glob("*.png"))
        return cls([file.read_bytes() for file in files], truth["digits"], truth["offline"])

    def accuracy(self, predictions: Sequence[int]) -> float:
        """Return the share of correct predictions."""
        pairs = zip(predictions, self.digits, strict=True)
        return sum(predicted == digit for predicted, digit in pairs) / len(self.digits)


def main() -> int:
    """Compare the predictions; return 1 if one differs."""
    options = _parse_options()
    held_out = HeldOut.read(options.build_dir)
    print(
        f"{len(held_out.images)} images, offline accuracy {held_out.accuracy(held_out.offline):.4%}"
    )
    verdicts = [
        _compare(options, held_out, archive, batch_size)
        for archive in ARCHIVES
        for batch_size in BATCH_SIZES
    ]
    return 0 if all(verdicts) else 1


def _compare(options: argparse.Namespace, held_out: HeldOut, archive: str, batch_size: int) -> bool:
    with registered(options.management, archive, batch_size) as model:
        served = classify(f"{options.inference}/predictions/{model}", held_out.images, batch_size)
    verdict = served == list(held_out.offline)
    accuracy = held_out.accuracy(served)
    print(
        f"{archive:<14} batch size {batch_size:>2}: served accuracy {accuracy:.4%}",
        "- every prediction as offline" if verdict else "- NOT the offline predictions",
    )
    return verdict


@contextmanager
def registered(management: str, archive: str, batch_size: int) -> Iterator[str]:
    """Register an archive of the model store with one worker; yield the model's name.

    Args:
        management: URL of the management listener.
        archive: Name of the archive without ``.mar``.
        batch_size: Maximal number of images in a batch.

    Raises:
        requests.HTTPError: The server refuses.
    """
    model = f"{archive}-{batch_size}"
    registration: dict[str, str | int] = {
        "url": f"{archive}.mar",
        "model_name": model,
        "batch_size": batch_size,
        "max_batch_delay": _MAX_BATCH_DELAY_MS,
        "initial_workers": 1,
        "synchronous": "true",
    }
    answer = requests.post(f"{management}/models", params=registration, timeout=_TIMEOUT)
    _check(answer)
    try:
        yield model
    finally:
        _check(requests.delete(f"{management}/models/{model}", timeout=_TIMEOUT))


def classify(url: str, images: Sequence[bytes], clients: int) -> list[int]:
    """Return the server's digits for PNG files, in order; one image per request.

    ``clients`` is the number of simultaneous requests.
    """
    local = threading.local()

    def predict(image: bytes) -> int:
        if not hasattr(local, "session"):
            local.session = requests.Session()
        answer = local.session.put(url, data=image, timeout=_TIMEOUT)
        _check(answer)
        return int(answer.json()["digit"])

    with ThreadPoolExecutor(clients) as threads:
        return list(threads.map(predict, images))


def _check(answer: requests.Response) -> None:
    if not answer.ok:
        raise requests.HTTPError(f"{answer.status_code}: {answer.text}", response=answer)


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--build-dir", type=Path, default=_BUILD, metavar="DIR")
    parser.add_argument("--inference", default="http://127.0.0.1:8080", metavar="URL")
    parser.add_argument("--management", default="http://127.0.0.1:8081", metavar="URL")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
