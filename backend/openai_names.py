"""The names by which clients of OpenAI's API address a model: ``model`` in the body of a request.

The frontend finds a model by them, and `vllm_handler` makes its engine accept them.
"""

from collections.abc import Mapping
from typing import Any


def openai_names(name: str, version: str, handler: Mapping[str, Any]) -> list[str]:
    """Return the names of a model version without those of its adapters.

    The first is the one in answers: ``served_model_name`` (a text or a list, which may stand in
    ``vllm_engine_config``), else the model's id or path, else ``name``. The registered ``name`` and
    ``name:version`` follow. ``handler`` is the section of model-config.yaml.
    """
    engine: Any = handler.get("vllm_engine_config")
    engine = engine if isinstance(engine, Mapping) else {}
    served = handler.get("served_model_name") or engine.get("served_model_name")
    served = served or engine.get("model") or handler.get("model_path") or []
    served = served if isinstance(served, list) else [served]
    return list(dict.fromkeys([*map(str, served), name, f"{name}:{version}"]))


def adapter_names(handler: Mapping[str, Any]) -> list[str]:
    """Return the names of the LoRA adapters of a model."""
    adapters = handler.get("adapters")
    return [str(name) for name in adapters] if isinstance(adapters, Mapping) else []
