"""``marserve demo``: trains a small network on scikit-learn's digits and serves it.

The server is a child of this process, with its archive in a temporary directory. It is stopped by
its process and not by the pid file, which may be another server's by then.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from marserve.frontend.configuration.config import Config
from marserve.frontend.configuration.loading import load_config
from marserve.frontend.configuration.properties import ConfigError
from marserve.frontend.lifecycle.daemon import server_command, wait_for_outcome
from marserve.frontend.lifecycle.pidfile import PidFile, PidFileError
from marserve.frontend.lifecycle.terminal import print_text
from marserve.tools.archiver.archiver import generate_model_archive
from marserve.tools.archiver.config import ModelArchiverConfig
from marserve.tools.bench.client import Client
from marserve.tools.bench.errors import BenchError
from marserve.tools.bench.generator.destination import Destination

_MODEL_CONFIG = "batchPolicy: adaptive\nminWorkers: 2\nmaxWorkers: 2\n"
_HELD_OUT = 360  # images that are not used for training
_CLIENTS = 8
_START_SECONDS = 60.0
_TIMEOUT_SECONDS = 120.0  # the first requests wait until the workers are ready


class DemoFailed(Exception):
    """The demo cannot continue."""


def main(arguments: Sequence[str]) -> int:
    """Run ``marserve demo``; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="marserve demo",
        description="Trains a small model, serves it until Ctrl-C on the addresses of the "
        "configuration (by default ports 8080 to 8082 of this machine), sends requests and prints "
        "what to try. It needs scikit-learn, not torch.",
    )
    parser.add_argument("--once", action="store_true", help="stop the server at the end")
    parser.add_argument("--ts-config", metavar="FILE", help="configuration file of the server")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with tempfile.TemporaryDirectory(prefix="marserve-demo-") as folder:
            _demonstrate(Path(folder), options.ts_config, once=options.once)
    except (DemoFailed, BenchError, ConfigError, PidFileError, OSError) as error:
        print_text(f"Failed: {error}")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _demonstrate(folder: Path, ts_config: str | None, *, once: bool) -> None:
    config = load_config({"model_store": str(folder)}, ts_config)
    if (pid := PidFile().read()) is not None:
        raise DemoFailed(f"A server is already running (pid {pid}): marserve --stop ends it.")
    images, digits = _pack(folder)
    chosen = ["--ts-config", ts_config] if ts_config else []
    models = ["--model-store", str(folder), "--models", "digits.mar"]
    with _running_server(["--ncs", *models, *chosen], folder, config.stop_seconds) as server:
        _predict(config, images, digits)
        print_text(_what_to_try(config, folder / "digit.json"))
        if not once:
            server.wait()
            raise DemoFailed("The server has ended by itself.")


def _pack(folder: Path) -> tuple[list[Any], list[int]]:
    """Train, and write the archive and a sample; return the held-out images and their digits."""
    try:
        import numpy as np
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
        from sklearn.neural_network import MLPClassifier
        from threadpoolctl import threadpool_limits
    except ImportError as error:
        raise DemoFailed(f"{error.name} is not installed: pip install scikit-learn") from None
    data = load_digits()
    known, unseen, labels, digits = train_test_split(
        data.images, data.target, test_size=_HELD_OUT, random_state=0, stratify=data.target
    )
    network = MLPClassifier(64, tol=1e-3, random_state=0)
    with threadpool_limits(1):  # on two busy cores, two threads take ten times as long
        network.fit(known.reshape(len(known), -1) / 16, labels)
    weights, model_config = folder / "digits.npz", folder / "model-config.yaml"
    np.savez(weights, *network.coefs_, *network.intercepts_)
    model_config.write_text(_MODEL_CONFIG, encoding="utf-8")
    settings = ModelArchiverConfig(
        model_name="digits",
        version="1.0",
        handler=str(Path(__file__).with_name("handler.py")),
        serialized_file=str(weights),
        config_file=str(model_config),
        export_path=str(folder),
    )
    archive = generate_model_archive(settings)
    print_text(f"Trained with {len(labels)} of scikit-learn's digits, and packed: {archive}")
    rows = ",\n ".join(json.dumps(row) for row in unseen[0].tolist())
    (folder / "digit.json").write_text(f"[{rows}]\n", encoding="utf-8")
    return unseen.tolist(), digits.tolist()


@contextlib.contextmanager
def _running_server(
    arguments: Sequence[str], folder: Path, stop_seconds: float
) -> "Iterator[subprocess.Popen[bytes]]":
    """Start the server, wait until it listens, and stop it at the end.

    Its logs and its output are in ``folder``.
    """
    logs = {name: str(folder / "logs") for name in ("LOG_LOCATION", "METRICS_LOCATION")}
    console = folder / "console.txt"
    report, inherited = os.pipe()
    with open(report, "rb"), open(inherited, "wb") as ours, console.open("wb") as output:  # noqa: PTH123 - descriptors
        server = subprocess.Popen(  # noqa: S603 - our own interpreter, the user's own flags
            server_command(arguments, "--report-descriptor", str(inherited)),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=[inherited],
            start_new_session=True,  # Ctrl-C signals the demo only
            env=logs | os.environ,
        )
        try:
            ours.close()
            outcome = wait_for_outcome(report, _START_SECONDS)
            if outcome is None:
                raise DemoFailed(f"The server did not start in {_START_SECONDS:g} s.")
            if not outcome.url:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    server.wait(stop_seconds)
                output_text = console.read_text(encoding="utf-8", errors="replace").strip()
                reason = outcome.error or output_text or f"its exit status is {server.returncode}."
                raise DemoFailed(f"The server did not start: {reason}")
            yield server
        finally:
            server.terminate()
            try:
                server.wait(stop_seconds)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _predict(config: Config, images: Sequence[Any], digits: Sequence[int]) -> None:
    headers = {"Content-Type": "application/json"}
    if config.token_authorization:
        headers["Authorization"] = f"Bearer {_inference_key(config.token_directory)}"
    destination = Destination(config.inference_address.client_url)
    client = Client(destination, headers, _TIMEOUT_SECONDS)

    def classify(image: Any) -> int:
        answer = client.ask("POST", "/predictions/digits", json.dumps(image).encode())
        if not answer.is_success:
            raise DemoFailed(f"{destination.url} answered {answer.status}: {answer.text}")
        return int(next(iter(answer.json())))

    with ThreadPoolExecutor(_CLIENTS) as threads:
        served = list(threads.map(classify, images))
    right = sum(one == other for one, other in zip(served, digits, strict=True)) / len(digits)
    print_text(f"Served {len(served)} digits that it was not trained with: {right:.1%} are right.")


def _inference_key(directory: Path | None) -> str:
    if directory:
        return (directory / "inference").read_text(encoding="utf-8").split()[0]
    return str(json.loads(Path("key_file.json").read_bytes())["inference"]["key"])


def _what_to_try(config: Config, sample: Path) -> str:
    inference, management = (
        config.inference_address.client_url,
        config.management_address.client_url,
    )
    lines = [
        "\nTry in another terminal; Ctrl-C here stops the server and removes its files:\n",
        f"curl -H 'Content-Type: application/json' -d @{sample} {inference}/predictions/digits",
        f"curl {management}/models/digits",
        f"marserve bench digits --input {sample} --url {inference} --management-url {management}\n",
    ]
    if config.token_authorization:
        keys = config.token_directory or Path("key_file.json").absolute()
        lines += [
            f"The keys are in {keys}. With curl add -H 'Authorization: Bearer KEY', the inference",
            "key for predictions, else the management key. The dashboard asks for the latter.\n",
        ]
    return "\n".join([*lines, f"Dashboard: {management}/dashboard"])
