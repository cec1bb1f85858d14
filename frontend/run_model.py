"""``marserve run``: runs a model's handler in this process, without a server.

It reads archives and resolves settings as the frontend, and runs the handler as a worker.
This process loads torch if the handler does.

The answers are written to stdout without changes, everything else to stderr.
"""

import argparse
import asyncio
import contextlib
import faulthandler
import logging
import mimetypes
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import BinaryIO

from marserve.backend.async_worker import new_loop
from marserve.backend.loader import load_service
from marserve.backend.manifest import MANIFEST_PATH
from marserve.backend.protocol import STREAM_NEXT, Input, Part, Piece, Predict, Prediction, Reply
from marserve.backend.service import Service
from marserve.backend.worker import WorkerPlace, enter_model
from marserve.frontend.archives.archive import ArchiveOpener, make_helpers
from marserve.frontend.archives.requirements import DependencyStore, Requirements
from marserve.frontend.configuration.loading import load_config
from marserve.frontend.configuration.properties import ConfigError
from marserve.frontend.documents import json_text
from marserve.frontend.errors import PredictionFailed, ServeError
from marserve.frontend.http.responses import check_prediction
from marserve.frontend.lifecycle.workdir import own_workdir
from marserve.frontend.registration.debugging import handler_path
from marserve.frontend.registration.model_builder import registered_manifest, registered_settings
from marserve.frontend.registration.model_changes import Registration
from marserve.frontend.serving.host import WorkerHost
from marserve.frontend.serving.worker_spec import ServedModel, load_message, worker_spec
from marserve.frontend.telemetry.gpu import count_gpus
from marserve.frontend.telemetry.metrics_config import load_metrics_config
from marserve.frontend.workers.devices import DeviceAllocator
from marserve.frontend.workers.launchers.local import LocalLauncher

logger = logging.getLogger(__name__)

_FAILED = 1
_STDIN = "-"
_DIRECTORY = f"a directory with {MANIFEST_PATH}, or with --handler any directory"


def main(arguments: Sequence[str]) -> int:
    """Run ``marserve run``; return 0 if every input was answered with success."""
    options = _parser().parse_args(arguments)
    with own_workdir() as workdir, _own_stdout() as stdout:
        faulthandler.enable()
        logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
        try:
            content_type, explain = options.content_type, options.explain
            inputs = [_read(name, content_type, explain=explain) for name in options.input]
            run = _prepare(options, workdir.path)
        except (ConfigError, ServeError, OSError) as error:
            logger.error("%s", error)  # noqa: TRY400 - the sentence is enough
            return _FAILED
        answers = _Answers(options.input, stdout)
        try:
            run.load(max(len(inputs), 1))
            if inputs:
                run.predict(inputs, answers)
        except BrokenPipeError:  # the reader of stdout has ended
            return _FAILED
        except (Exception, SystemExit):
            logger.exception("The handler failed.")
            return _FAILED
        answers.close()
        return _FAILED if answers.failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="marserve run",
        description="Loads a model and runs its handler once over some inputs, in this process, "
        "without a server, and prints the answers. Exits with 1, and the handler's traceback, on "
        "failure.",
    )
    option = parser.add_argument
    option("model", metavar="MODEL", help=f"a model archive, {_DIRECTORY}")
    bodies = (
        "body of a request, - for the standard input; several form one batch; without any the "
        "model is only loaded"
    )
    option("--input", metavar="FILE", nargs="+", action="extend", default=[], help=bodies)
    option("--content-type", metavar="TYPE", help="of all inputs; by default, by their names")
    handler = "a Python file, FILE:FUNCTION or a built-in name that replaces the archive's"
    option("--handler", metavar="HANDLER", default="", help=handler)
    config = "configuration file, for service_envelope, metrics_config and other keys of handlers"
    option("--ts-config", metavar="FILE", help=config)
    explain = "request explanations instead of predictions"
    option("--explain", action="store_true", help=explain)
    return parser


@contextlib.contextmanager
def _own_stdout() -> Iterator[BinaryIO]:
    """Return stdout for the answers; what the handler prints goes to stderr meanwhile."""
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "wb") as ours:
        os.dup2(2, 1)
        try:
            yield ours
        finally:
            sys.stdout.flush()
            os.dup2(ours.fileno(), 1)


def _read(name: str, content_type: str | None, *, explain: bool) -> Input:
    body = sys.stdin.buffer.read() if name == _STDIN else Path(name).read_bytes()
    if content_type is None:
        guessed, encoding = mimetypes.guess_type(name)
        content_type = "" if encoding else guessed or ""
    headers = {"Content-Type": content_type} if content_type else {}
    headers |= {"Content-Length": str(len(body)), "url_path": "", "explain": str(explain)}
    media_type = content_type.partition(";")[0]
    # A bytearray, as in a worker: the handler may change it.
    return Input(f"run-{name}", headers, [Part("body", media_type, bytearray(body))])


def _prepare(options: argparse.Namespace, workdir: Path) -> "_Run":
    """Unpack the model, resolve its settings and install its packages; import none of its code.

    Raises:
        ServeError: The model cannot be served.
        ConfigError: The configuration file cannot be used.
        OSError: The model cannot be read.
    """
    path = Path(os.path.abspath(options.model))  # noqa: PTH100 - a link stays where it is
    if not path.exists():
        raise FileNotFoundError(f"There is no {path}.")
    config = load_config({"model_store": str(path.parent)}, options.ts_config)
    if "tsConfigFile" in config.texts:
        logger.info("Configuration file: %s", config.texts["tsConfigFile"])
    helpers = make_helpers(config)
    opener = ArchiveOpener(config, workdir, helpers)
    archive = asyncio.run(opener.open(str(path) if path.is_dir() else path.name))
    # The launcher is not used.
    host = WorkerHost(config, LocalLauncher("spawn"), DeviceAllocator(count_gpus()))
    registration = Registration(url=str(path), handler=handler_path(options.handler), at_start=True)
    manifest = registered_manifest(archive, registration, config)
    if not manifest.handler:
        raise ServeError(f"No handler is named. MODEL is an archive, {_DIRECTORY}.")
    settings = registered_settings(archive, manifest, registration, host)
    # For this process: neither for another interpreter nor in an environment of its own.
    store = DependencyStore(config.dependency_cache, "", host.environment(), helpers)
    file = manifest.requirements_file if config.install_py_dep_per_model else ""
    needed = Requirements(manifest.model_name, archive.directory, file, venv=False)
    packages = asyncio.run(store.install(needed))
    model = ServedModel(manifest, archive.directory, settings, packages)
    if settings.has_ranks:
        raise ServeError("A model of several processes (parallelType) can be run by a server only.")
    return _Run(host, model)


@dataclass(eq=False)
class _Run:
    host: WorkerHost
    model: ServedModel
    _service: Service = field(init=False)
    _loop: asyncio.AbstractEventLoop | None = field(default=None, init=False)

    def load(self, count: int) -> None:
        """Load the model for batches of at least ``count`` inputs; raise as the handler does."""
        model, host = self.model, self.host
        settings = model.settings
        gpus = host.devices.acquire(1, settings.device_ids) if settings.use_gpu else ()
        spec = worker_spec(model, host, 0, gpus, position=0, count=1)
        os.environ.update(spec.environment)
        enter_model(
            WorkerPlace(
                python_path=spec.python_path, model_dir=spec.model_dir, threads=spec.threads
            )
        )
        if settings.asynchronous:
            self._loop = new_loop()
        run = self._loop.run_until_complete if self._loop else None
        metrics = load_metrics_config(host.config.metrics_config).declarations
        load = load_message(model, host.config, gpus[0] if gpus else None, metrics)
        load = replace(load, batch_size=max(count, load.batch_size))
        self._service = load_service(load, run)

    def predict(self, inputs: Sequence[Input], answers: "_Answers") -> None:
        """Run the inputs as one batch, or one by one if the handler is asynchronous."""
        if self._loop is None:
            self._predict_batch(inputs, list(range(len(inputs))), answers)
            return
        for index, input_ in enumerate(inputs):
            send = partial(answers.add, indexes=[index])
            send(
                self._loop.run_until_complete(
                    self._service.predict_request(Predict([input_]), send)
                )
            )

    def _predict_batch(
        self, inputs: Sequence[Input], indexes: list[int], answers: "_Answers"
    ) -> None:
        """Run the handler, and again for the answers that continue in steps."""
        while indexes:
            run_as = self.model.settings.batching.run_as(len(indexes))
            send = partial(answers.add, indexes=indexes)
            batch = Predict([inputs[index] for index in indexes], run_as=run_as)
            reply = self._service.predict(batch, send)
            send(reply)
            if not self.model.settings.continuous_batching or reply.code != 200:
                return
            indexes = [
                index
                for index, prediction in zip(indexes, reply.predictions, strict=True)
                if prediction.headers.get(STREAM_NEXT) == "true"
            ]
            inputs = [Input(input_.id, input_.headers, []) for input_ in inputs]


@dataclass(eq=False)
class _Answers:
    """Prints the bodies of answers, and their heads on stderr, with the inputs' ``names``."""

    names: Sequence[str]
    stdout: BinaryIO
    failed: bool = False  # whether any answer is a failure
    _index: int = -1
    _lacks_newline: bool = False

    def add(self, reply: Reply | Piece, indexes: Sequence[int]) -> None:
        """Print a reply, or a piece of one, for the inputs at these indexes."""
        if reply.code != 200:
            failure = _failure(PredictionFailed(reply.message, status=reply.code))
            predictions = [failure] * len(indexes)
        else:
            predictions = reply.predictions
            if isinstance(reply, Piece):
                indexes = [indexes[place] for place in reply.places]
        for index, prediction in zip(indexes, predictions, strict=True):
            self._print(index, _checked(prediction))

    def close(self) -> None:
        """End the last line and flush."""
        if self._lacks_newline:
            self.stdout.write(b"\n")
        self.stdout.flush()

    def _print(self, index: int, prediction: Prediction) -> None:
        if index != self._index:
            self.close()
            self._lacks_newline = False
            self._index = index
            status = f"{prediction.status} {prediction.reason}".strip()
            headers = "".join(f"\n  {key}: {value}" for key, value in prediction.headers.items())
            logger.info("%s: %s%s", self.names[index], status, headers)
        self.failed = self.failed or prediction.status >= 400
        body = bytes(prediction.body)
        self.stdout.write(body)
        self.stdout.flush()
        if body:
            self._lacks_newline = not body.endswith(b"\n") and b"\0" not in body


def _checked(prediction: Prediction) -> Prediction:
    """Return the prediction, or the error of a client if HTTP cannot contain it."""
    try:
        check_prediction(prediction)
    except ServeError as error:
        return _failure(error)
    return prediction


def _failure(error: ServeError) -> Prediction:
    document = {"code": error.status, "type": error.wire_type, "message": error.message or None}
    return Prediction(json_text(document).encode(), error.status)
