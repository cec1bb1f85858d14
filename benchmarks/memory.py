"""The memory of workers that serve the same weights: PSS, where a page of n processes is 1/n."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
from processes import Marserve
from report import Row
from resnet152 import PHOTOGRAPH, pack_resnet

_WORKERS = 4
_GOAL = 1.5
_PREDICTIONS = 8  # per worker
_FORMATS = {"pickle": ".pth", "safetensors": ".safetensors"}


def measure(directory: Path, quick: bool) -> list[Row]:
    """All processes but the frontend, after their workers have served; four workers by one."""
    repetitions = 1 if quick else 3
    rows = []
    for name, suffix in _FORMATS.items():
        pack_resnet(directory, name=name, suffix=suffix, archive_format="zip-store")
        one, several = zip(
            *(
                (_used(directory, name, 1), _used(directory, name, _WORKERS))
                for _ in range(repetitions)
            ),
            strict=True,
        )
        what = f"ResNet-152 as {name}, {_WORKERS} workers, PSS: MB"
        rows.append(Row(what, several, "one worker", one, at_most=_GOAL))
    return rows


def _used(directory: Path, name: str, workers: int) -> float:
    """MB that the workers and the fork server of a fresh server take once they have served."""
    # From the start as many as there will be: a worker's threads are counted when it starts.
    with (
        Marserve(directory).running() as server,
        server.model(f"{name}.mar", initial_workers=workers),
    ):
        _serve(server, f"/predictions/{name}", workers)
        return sum(map(pss_mb, psutil.Process(server.pid).children(recursive=True)))


def _serve(server: Marserve, path: str, workers: int) -> None:
    """Keep all workers busy for a few predictions of each: every weight is touched."""
    body = PHOTOGRAPH.read_bytes()
    with ThreadPoolExecutor(2 * workers) as clients:
        # A list: errors are raised.
        list(clients.map(lambda _: server.predict(path, body), range(_PREDICTIONS * workers)))


def pss_mb(process: psutil.Process) -> float:
    """The memory of a process in MB, a page that n processes share counted as 1/n."""
    return float(process.memory_full_info().pss / 1e6)
