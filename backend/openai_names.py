"""The names by which clients of OpenAI's API address a model: ``model`` in the body of a request.

The frontend finds a model by them, and `vllm_handler` makes its engine accept them. A model is also
addressed by its registered name, and by ``name:version``.
"""

from collections.abc import Mapping
from typing import Any


def served_names(handler: Mapping[str, Any]) -> list[str]:
    """Return the names in the section ``handler`` of model-config.yaml; answers have the first.

    They are ``served_model_name`` (a text or a list, which may stand in ``vllm_engine_config``),
    else the model's id or path.
    """
    engine: Any = handler.get("vllm_engine_config")
    engine = engine if isinstance(engine, Mapping) else {}
    served = handler.get("served_model_name") or engine.get("served_model_name")
    served = served or engine.get("model") or handler.get("model_path") or []
    return [str(name) for name in (served if isinstance(served, list) else [served])]


def adapter_names(handler: Mapping[str, Any]) -> list[str]:
    """Return the names of the LoRA adapters."""
    adapters = handler.get("adapters")
    return [str(name) for name in adapters] if isinstance(adapters, Mapping) else []
