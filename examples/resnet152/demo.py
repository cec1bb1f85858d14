"""ResNet-152 from weights to answers: each step prints the command of a user and runs it.

The demo is also a test: it checks what it prints, and the exit status is 1 if something is wrong.
It works from the root of the project.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import claims
import pack
from claims import Answer, Batches, require
from client import Client
from server import check_startable, running_server
from terminal import DemoFailed, readable, run, say

from marserve.frontend.configuration.config import Config
from marserve.frontend.configuration.loading import load_config
from marserve.frontend.configuration.properties import ConfigError

_ROOT = Path(__file__).resolve().parents[2]
_REGISTRATION = "batch_size=8&max_batch_delay=50&initial_workers=1&synchronous=true"
_TOGETHER = 8
_ATTEMPTS = 10  # on a busy machine eight uploads may take longer than the 50 ms that a batch waits


def main() -> int:
    """Run the demo and return its exit status."""
    options = _parse_options()
    # SIGTERM stops the server as well, as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    os.chdir(_ROOT)
    try:
        _demonstrate(options)
    except (DemoFailed, ConfigError) as failure:
        say(f"\nFailed: {failure}")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--once", action="store_true", help="stop the server at the end")
    parser.add_argument(
        "--config", type=_absolute, metavar="FILE", help="instead of config.properties"
    )
    parser.add_argument(
        "--build-dir",
        type=_absolute,
        default=_ROOT / "build" / "resnet152",
        metavar="DIR",
        help="for the parts of the archive and the server's output",
    )
    parser.add_argument(
        "--random-weights", action="store_true", help="do not look for torchvision's weights"
    )
    return parser.parse_args()


def _absolute(text: str) -> Path:
    return Path(text).absolute()


def _demonstrate(options: argparse.Namespace) -> None:
    config = load_config(ts_config=str(options.config) if options.config else None)
    _bypass_proxies(config)
    check_startable(config)
    weights = _pack(config, options.build_dir, download=not options.random_weights)
    log = options.build_dir / "server.log"
    client = Client()
    with running_server(config, options.config, log) as server:
        _register(client, config)
        first = _classify(client, config, weights)
        _send_together(client, config, first)
        say("\nEverything printed above is true.")
        if not options.once:
            say("The server keeps running: try the commands in another terminal. Ctrl-C stops it.")
        say(f"Dashboard: {config.management_address.url}/dashboard")
        if not options.once:
            _wait_for_end(server)


def _bypass_proxies(config: Config) -> None:
    """Exclude our own listeners from the proxies of the environment."""
    hosts = {address.host for address in config.listeners}
    for name in ("no_proxy", "NO_PROXY"):
        os.environ[name] = ",".join([*hosts, *filter(None, [os.environ.get(name)])])


def _pack(config: Config, folder: Path, *, download: bool) -> str:
    archive = config.model_store / f"{pack.MODEL_NAME}.mar"
    folder.mkdir(parents=True, exist_ok=True)
    say("Pack: the model's class, its weights and the names of its classes become one archive.")
    weights = pack.packed_weights(archive)
    if weights is not None:
        say(f"{readable(archive)} is packed already, weights: {weights}.")
        return weights
    weights = pack.write_parts(folder, download=download)
    say(run(pack.archiver_command(folder, config.model_store)))
    require(pack.packed_weights(archive) == weights, f"{archive} has other weights.")
    return weights


def _register(client: Client, config: Config) -> None:
    say(client.get(f"{config.inference_address.url}/ping"))
    say("\nRegister: one worker loads the model; batches of up to 8, waiting up to 50 ms.")
    url = f"{config.management_address.url}/models?url={pack.MODEL_NAME}.mar&{_REGISTRATION}"
    say(client.post(url))


def _classify(client: Client, config: Config, weights: str) -> Answer:
    say("\nPredict: what is in this photograph?")
    answer = claims.check_answer(
        json.loads(client.upload(_photograph("china.jpg"), _prediction_url(config))),
        list(pack.class_names().values()),
    )
    say(claims.table(answer))
    if weights == pack.RANDOM:
        say(
            "The weights are random, because torchvision's were not downloaded: these classes mean "
            f"nothing.\nTo try the download again, delete {pack.MODEL_NAME}.mar."
        )
    return answer


def _send_together(client: Client, config: Config, first: Answer) -> None:
    say(f"\nBatch: {_TOGETHER} photographs at once, two motifs in turn.")
    before = _count_batches(client, config)
    for _ in range(_ATTEMPTS):
        photographs = [_photograph("china.jpg"), _photograph("flower.jpg")] * (_TOGETHER // 2)
        answers = client.upload_together(photographs, _prediction_url(config))
        _check_pairs(answers, first)
        after = _count_batches(client, config)
        travelled = after.since(before)
        if travelled == Batches(batches=1, requests=_TOGETHER):
            say(f"One batch and {_TOGETHER} requests more than before: they travelled together.")
            return
        before = after
        say(
            f"{travelled.requests} requests in {travelled.batches} batches: on this busy machine "
            "they came too late for one another. The next attempt follows."
        )
    raise DemoFailed(f"In {_ATTEMPTS} attempts, {_TOGETHER} photographs never made one batch.")


def _check_pairs(answers: list[object], first: Answer) -> None:
    """Check that half of the answers are equal to the first one, and half are different."""
    names = list(pack.class_names().values())
    checked = [claims.check_answer(answer, names) for answer in answers]
    known = [answer for answer in checked if claims.is_same(answer, first)]
    other = [answer for answer in checked if not claims.is_same(answer, first)]
    half = _TOGETHER // 2
    require(len(known) == len(other) == half, f"Photographs got each other's answers: {checked}")
    require(
        all(claims.is_same(answer, other[0]) for answer in other),
        f"The same photograph got different answers: {other}",
    )
    for motif, answer in (("china.jpg", first), ("flower.jpg", other[0])):
        name, number = claims.best(answer)
        say(f"  {half} x {motif:<10}  {name}  {number:.2%}")


def _count_batches(client: Client, config: Config) -> Batches:
    text = client.get(f"{config.metrics_address.url}/metrics?{claims.BATCH_METRICS}")
    say("\n".join(line for line in text.splitlines() if not line.startswith("#")))
    return Batches.read(text, pack.MODEL_NAME)


def _prediction_url(config: Config) -> str:
    return f"{config.inference_address.url}/predictions/{pack.MODEL_NAME}"


def _photograph(name: str) -> Path:
    from sklearn.datasets import load_sample_images

    return next(path for path in map(Path, load_sample_images().filenames) if path.name == name)


def _wait_for_end(server: "subprocess.Popen[bytes]") -> None:
    try:
        server.wait()
    except KeyboardInterrupt:
        return
    raise DemoFailed("The server has ended by itself.")


if __name__ == "__main__":
    sys.exit(main())
