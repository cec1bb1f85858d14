"""``ts.model_service.model_service``: base classes of the time of MXNet.

The manifest names a *signature* (``Model``, ``Signature``), a JSON file with names and types of the
model's inputs:

    {"input_type": "application/json", "inputs": [{"data_name": "data"}]}
"""

import ast
import json
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from marserve.backend.context import Context
from marserve.backend.errors import PredictionException
from marserve.handlers.utils import read_json


class ModelService(ABC):
    """A handler that answers one request at a time."""

    def __init__(
        self, model_name: str, model_dir: str, manifest: Any, gpu: int | None = None
    ) -> None:
        del model_name, model_dir, manifest, gpu  # initialize reads them from the context
        self.ctx: Any = None
        self._context: Any = None
        self._signature: Any = None

    def initialize(self, context: Context) -> None:
        """Read the signature; ValueError if the file is missing."""
        self._context = context
        name = ((context.manifest or {}).get("Model") or {}).get("Signature")
        path = Path(str(context.system_properties["model_dir"]), name or "signature.json")
        if not path.is_file():
            raise ValueError("Signature file is not found.")
        self._signature = read_json(path)

    @abstractmethod
    def inference(self, data: Any) -> Any:
        """Return the answer to a list with one input: a list with one element, or the element."""

    @abstractmethod
    def ping(self) -> Any:
        """Return whether the model works."""

    def signature(self) -> Any:
        """Return the signature."""
        return self._signature

    def handle(self, data: Any, context: Context) -> list[Any]:
        """Answer the first request; bytes are parsed as JSON, or as Python literals."""
        del context
        names = (self._signature["inputs"][0]["data_name"], "body", "data")
        value = next((data[0][name] for name in names if data[0].get(name) is not None), None)
        is_json = self._signature["input_type"] == "application/json"
        if is_json and isinstance(value, bytes | bytearray):
            value = _parsed(value)
        answer = self.inference([value])
        return answer if isinstance(answer, list) else [answer]


class SingleNodeService(ModelService):
    """A `ModelService` in three stages."""

    def inference(self, data: Any) -> Any:
        """Run the stages."""
        return self._postprocess(self._inference(self._preprocess(data)))

    @abstractmethod
    def _inference(self, data: Any) -> Any: ...

    def _preprocess(self, data: Any) -> Any:
        return data

    def _postprocess(self, data: Any) -> Any:
        return data


def _parsed(body: bytes | bytearray) -> Any:
    """Parse JSON, or else a Python literal; PredictionException 400 for anything else."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        pass
    try:
        return ast.literal_eval(body.decode())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise PredictionException("The request is not JSON.", 400) from error
