"""Sample inputs: inputs like a client's, to try a model with before clients send theirs.

A sample is a file of the archive, or the handler returns it (``sample_input``).
"""

import json
import mimetypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from marserve.backend.batch_run import repeats
from marserve.backend.protocol import Input, Load, Part, Predict, Reply
from marserve.backend.service import Service


class NoSample(Exception):
    """No sample input is usable; the message is the reason."""


class WarmUpFailed(Exception):
    """A batch of samples could not be run; the message is the reason."""


def warm_up(load: Load, service: Service) -> None:
    """Run `Context.warm_ups`, when ``initialize`` has returned: a subclass may load more."""

    def run_samples(rows: int = 1, file: str = "") -> None:
        if load.asynchronous:
            raise WarmUpFailed("a handler that is a coroutine gets its requests one by one")
        try:
            sample = find_sample(load, service, file)
        except NoSample as error:
            raise WarmUpFailed(str(error)) from error
        reply = predict_samples(service, sample, rows)
        if status := failed_status(reply):
            reason = f" ({reply.message})" if reply.message else ""
            raise WarmUpFailed(
                f"the sample input failed with status {status}{reason}; see the model's log"
            )

    warm_ups, service.context.warm_ups = service.context.warm_ups, []
    if warm_ups:
        with service.without_traces():
            for each in warm_ups:
                each(run_samples)


def find_sample(load: Load, service: Service, file: str = "") -> Input:
    """Return the first sample of a model, or the one in ``file``; raises NoSample."""
    files = [file] if file else load.samples[:1]
    return find_samples(load.model_dir, files, service.sample_input)[0]


def find_samples(
    model_dir: str, files: Sequence[str], sample_input: Callable[[], Any]
) -> list[Input]:
    """Return requests with samples as their bodies, at least one; raises NoSample.

    The names of files give the content type. Without files ``sample_input`` is called, which
    returns bytes, str or a value for JSON; a tuple of several; or None.
    """
    found = [_read_file(Path(model_dir), file) for file in files] or _from_handler(sample_input)
    return [
        Input("sample", {"Content-Type": kind} if kind else {}, [Part("body", kind, body)])
        for kind, body in found
    ]


def predict_samples(service: Service, sample: Input, rows: int) -> Reply:
    """Run a batch of copies of a sample."""
    ids = (f"{sample.id}-{place}" for place in range(rows))
    return service.predict(Predict(repeats(sample, ids)))


def failed_status(reply: Reply) -> int:
    """Return the first status by which a batch of samples failed; 0 if none did."""
    if reply.code != 200:
        return reply.code
    return next((each.status for each in reply.predictions if each.status >= 400), 0)


def _read_file(model_dir: Path, name: str) -> tuple[str, bytes]:
    path = (model_dir / name).resolve()
    if not path.is_relative_to(model_dir.resolve()):
        raise NoSample(f"the sample input {name!r} is outside the model's directory")
    content_type, encoding = mimetypes.guess_type(path.name)
    try:
        body = path.read_bytes()
    except OSError as error:
        raise NoSample(f"the sample input {name!r} cannot be read: {error.strerror}") from error
    return "" if encoding or not content_type else content_type, body


def _from_handler(sample_input: Callable[[], Any]) -> list[tuple[str, bytes]]:
    try:
        returned = sample_input()
        samples = returned if isinstance(returned, tuple) else (returned,)
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
