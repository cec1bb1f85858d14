"""The base classes of TorchServe's ancestor, from the days of MXNet.

A model there had a *signature*, a JSON file that the manifest names (``Model``, ``Signature``): how
its inputs are called, and of which type they are.

    {"input_type": "application/json", "inputs": [{"data_name": "data"}]}
"""

import ast
import json
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from marserve.backend.context import Context


class ModelService(ABC):
    """A handler that answers one request at a time, in the terms of a signature."""

    def __init__(
        self, model_name: str, model_dir: str, manifest: Any, gpu: int | None = None
    ) -> None:
        del model_name, model_dir, manifest, gpu  # initialize has them from the context
        self.ctx: Any = None
        self._context: Any = None
        self._signature: Any = None

    def initialize(self, context: Context) -> None:
        """Read the signature.

        Raises:
            ValueError: There is none.
        """
        self._context = context
        name = ((context.manifest or {}).get("Model") or {}).get("Signature")
        path = Path(str(context.system_properties["model_dir"]), name or "signature.json")
        if not path.is_file():
            raise ValueError("Signature file is not found.")
        self._signature = json.loads(path.read_text(encoding="utf-8"))

    @abstractmethod
    def inference(self, data: Any) -> Any:
        """Answer a list with one input: a list with one element, or that element."""

    @abstractmethod
    def ping(self) -> Any:
        """Tell whether the model works."""

    def signature(self) -> Any:
        """Return the signature."""
        return self._signature

    def handle(self, data: Any, context: Context) -> list[Any]:
        """Answer the first request, its input under the signature's name, ``body`` or ``data``."""
        del context
        names = (self._signature["inputs"][0]["data_name"], "body", "data")
        value = next((data[0][name] for name in names if data[0].get(name) is not None), None)
        if self._signature["input_type"] == "application/json":
            value = _parsed(value)
        answer = self.inference([value])
        return answer if isinstance(answer, list) else [answer]


class SingleNodeService(ModelService):
    """A `ModelService` in three stages."""

    def inference(self, data: Any) -> Any:
        """Run the stages."""
        return self._postprocess(self._inference(self._preprocess(data)))

    @abstractmethod
    def _inference(self, data: Any) -> Any:
        """Run the model."""

    def _preprocess(self, data: Any) -> Any:
        """Prepare the input; by default as it is."""
        return data

    def _postprocess(self, data: Any) -> Any:
        """Make the answer; by default as it is."""
        return data


def _parsed(value: Any) -> Any:
    """Parse JSON, or the Python literals that these models' clients sent."""
    if not isinstance(value, bytes | bytearray):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return ast.literal_eval(value.decode())
