"""The process that compares a model with itself in a lower precision.

The configuration of the model directory enables the comparison (``optimization.check_accuracy``),
and a service is loaded as in a worker. The process prints the result to stdout as JSON, and all
other output to stderr.
"""

import json
import os
import sys
from pathlib import Path

from marserve.backend.errors import OptionRefused, sentence_of
from marserve.backend.loader import load_service
from marserve.backend.manifest import Manifest
from marserve.backend.protocol import Input, Load, Predict
from marserve.backend.worker import WorkerPlace, enter_model

_MAX_BYTES = 2**31 - 1


def main(directory: str, sample: str) -> None:
    """Load the model of a directory, and print the result of the comparison or its failure."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with answer:
        json.dump(_compare(directory, sample), answer)


def _compare(directory: str, sample: str) -> object:
    manifest = Manifest.read(Path(directory))
    assert manifest is not None
    enter_model(WorkerPlace(python_path=(directory,), model_dir=directory, threads=0))
    load = Load(
        manifest.model_name,
        directory,
        manifest.handler,
        batch_size=1,
        gpu_id=None,
        limit_max_image_pixels=True,
        max_response_bytes=_MAX_BYTES,
        server_version="",
        samples=[sample] if sample else [],
    )
    try:
        service = load_service(load)
        reply = service.predict(Predict([Input("describe", {"describe": "True"}, [])]))
        described = json.loads(bytes(reply.predictions[0].body))
    except OptionRefused as error:
        return {"reason": str(error)}
    except Exception as error:  # noqa: BLE001 - foreign code
        return {"reason": sentence_of(error)}
    try:
        return described["optimization"]["accuracy"]
    except (KeyError, TypeError):
        return {"reason": "the handler does not read the section optimization, as BaseHandler does"}


if __name__ == "__main__":
    main(*sys.argv[1:])
