"""Samples, inputs like a client's to try a model with, and the batches of them that warm it up.

A sample is a file of the archive, or comes from the handler. A handler asks for warm-ups, to
compile or to compare, in `Context.warm_ups`. They run once its ``initialize`` is done to its end (a
subclass may still have a vocabulary to load when its base class asks) and go through the same
`Service.predict` as traffic.
"""

import json
import mimetypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from marserve.backend.protocol import Input, Load, Part, Reply
from marserve.backend.service import Service, repeats


class NoSample(Exception):
    """There is no input to try the model with; the text says why."""


class WarmUpFailed(Exception):
    """A batch of samples could not be run; the text says why."""


def warm_up(load: Load, service: Service) -> None:
    """Run what the handler asked for; its context is afterwards as it was.

    Whatever a warm-up raises is raised: the model is not fit to serve.
    """

    def run_samples(rows: int = 1, file: str = "") -> None:
        if load.asynchronous:
            raise WarmUpFailed("a handler that is a coroutine gets its requests one by one")
        try:
            sample = find_sample(load.model_dir, file or load.sample_input, service.sample_input)
        except NoSample as error:
            raise WarmUpFailed(str(error)) from error
        reply = predict_samples(service, sample, rows)
        if status := failed_status(reply):
            reason = f" ({reply.message})" if reply.message else ""
            raise WarmUpFailed(
                f"the sample input failed with status {status}{reason}; the model's log tells why"
            )

    warm_ups, service.context.warm_ups = service.context.warm_ups, []
    if warm_ups:
        with service.without_traces():
            for each in warm_ups:
                each(run_samples)


def find_sample(model_dir: str, file: str, ask: Callable[[], Any]) -> Input:
    """Return a request with a sample as its body.

    Without a ``file`` in the model's directory the handler is asked: bytes, str or what can be
    JSON; None where it has no sample. The name of a file tells what it is: JSON and text reach the
    handler decoded, as from a client.

    Raises:
        NoSample: The file cannot be read or is outside the directory, or the handler has none.
    """
    return find_samples(model_dir, [file] if file else [], ask)[0]


def find_samples(model_dir: str, files: Sequence[str], ask: Callable[[], Any]) -> list[Input]:
    """Return requests with samples as their bodies; at least one, see `find_sample`.

    A handler that has several gives them as a tuple; a list is one, as JSON.

    Raises:
        NoSample: See `find_sample`.
    """
    found = [_of_file(Path(model_dir), file) for file in files] or _of_handler(ask)
    return [
        Input("sample", {"Content-Type": kind} if kind else {}, [Part("body", kind, body)])
        for kind, body in found
    ]


def predict_samples(service: Service, sample: Input, rows: int) -> Reply:
    """Run a batch of so many samples."""
    return service.predict(repeats(sample, (f"{sample.id}-{place}" for place in range(rows))))


def failed_status(reply: Reply) -> int:
    """Return the first status by which a batch of samples failed; 0 if none did."""
    if reply.code != 200:
        return reply.code
    return next((each.status for each in reply.predictions if each.status >= 400), 0)


def _of_file(model_dir: Path, name: str) -> tuple[str, bytes]:
    path = (model_dir / name).resolve()
    if not path.is_relative_to(model_dir.resolve()):
        raise NoSample(f"the sample input {name!r} is outside the model's directory")
    content_type, encoding = mimetypes.guess_type(path.name)
    try:
        body = path.read_bytes()
    except OSError as error:
        raise NoSample(f"the sample input {name!r} cannot be read: {error.strerror}") from error
    return "" if encoding or not content_type else content_type, body


def _of_handler(ask: Callable[[], Any]) -> list[tuple[str, bytes]]:
    try:
        given = ask()
        samples = given if isinstance(given, tuple) else (given,)
        found = [_encoded(sample) for sample in samples if sample is not None]
    except (Exception, SystemExit) as error:  # foreign code
        raise NoSample(f"the handler's sample_input failed: {error!r}") from error
    if not found:
        raise NoSample(
            "there is no sample input: name a file of the archive as sampleInput in "
            "model-config.yaml, or give the handler a method sample_input()"
        )
    return found


def _encoded(sample: Any) -> tuple[str, bytes]:
    if isinstance(sample, bytes | bytearray):
        return "", bytes(sample)
    if isinstance(sample, str):
        return "text/plain", sample.encode()
    return "application/json", json.dumps(sample).encode()
