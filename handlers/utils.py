"""Helpers that handlers import from TorchServe: ``ts.utils.util`` and ``ts.handler_utils.utils``.

This module does not load torch.
"""

import enum
import functools
import importlib
import inspect
import json
import logging
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

import yaml

from marserve.backend.errors import PredictionException
from marserve.handlers.torchserve_api.predict_response import (
    create_predict_response,
    send_pieces,
)

__all__ = [
    "CLEANUP_REGEX",
    "PREDICTION_METRIC",
    "PT2Backend",
    "PredictionException",
    "check_valid_pt2_backend",
    "create_predict_response",
    "deprecated",
    "get_yaml_config",
    "import_class",
    "list_classes_from_module",
    "load_label_mapping",
    "map_class_to_label",
    "send_intermediate_predict_response",
    "value_of",
]

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

PREDICTION_METRIC = "PredictionTime"
# HTML tags and entities.
CLEANUP_REGEX = re.compile(r"<[^>]*>|&(?:[a-z0-9]+|#[0-9]{1,6}|#x[0-9a-f]{1,6});", re.IGNORECASE)
_NAME_LIST = "object_type_names"


class PT2Backend(str, enum.Enum):  # noqa: UP042 - its str() is TorchServe's
    """The backends of torch.compile that model-config.yaml may name."""

    EAGER = "eager"
    AOT_EAGER = "aot_eager"
    INDUCTOR = "inductor"
    NVFUSER = "nvfuser"
    AOT_NVFUSER = "aot_nvfuser"
    AOT_CUDAGRAPHS = "aot_cudagraphs"
    OFI = "ofi"
    FX2TRT = "fx2trt"
    ONNXRT = "onnxrt"
    IPEX = "ipex"
    TORCHXLA_TRACE_ONCE = "torchxla_trace_once"
    OPENVINO = "openvino"
    TENSORRT = "tensorrt"
    HPU_BACKEND = "hpu_backend"


def check_valid_pt2_backend(backend: str) -> bool:
    """Return whether a backend of torch.compile is supported; log it if not."""
    known = [member.value for member in PT2Backend]
    if backend in known:
        return True
    logger.warning("%s is not a supported backend; supported are %s", backend, ", ".join(known))
    return False


def get_yaml_config(yaml_file_path: str | Path) -> dict[str, Any]:
    """Read a YAML file; an empty one is an empty mapping. A YAMLError names the file."""
    path = Path(yaml_file_path)
    try:
        return yaml.safe_load(path.read_bytes()) or {}
    except yaml.YAMLError as error:
        raise yaml.YAMLError(f"{path.name} is not valid YAML: {error}") from error


def read_json(path: Path) -> Any:
    """Read a JSON file, with or without a byte order mark; a ValueError names the file."""
    try:
        return json.loads(path.read_bytes())  # bytes: it recognises the mark, and UTF-16
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name} is not valid JSON: {error}") from error


def import_class(class_name: str, module_prefix: str | None = None) -> type:
    """Import ``package.module.Class``, or ``Class`` with the module as prefix, or ImportError."""
    module_name, _, name = class_name.rpartition(".")
    full_name = ".".join(part for part in (module_prefix, module_name) if part)
    if not full_name:
        raise ImportError(f"{class_name!r} does not contain a module to import from")
    found = getattr(importlib.import_module(full_name), name, None)
    if not inspect.isclass(found):
        raise ImportError(f"Module {full_name!r} has no class {name!r}")
    return found


def list_classes_from_module(module: ModuleType, parent_class: type | None = None) -> list[type]:
    """List the classes that a module defines by name, or only subclasses of ``parent_class``."""
    return [
        member
        for _, member in inspect.getmembers(module, inspect.isclass)
        if member.__module__ == module.__name__
        and (parent_class is None or issubclass(member, parent_class))
    ]


def load_label_mapping(mapping_file_path: str | Path) -> dict[str, str] | None:
    """Read index_to_name.json as ``{"0": name, …}``; None, with a warning, if it does not exist.

    Three forms are in use; others are a ValueError:

        {"0": "tabby"}    {"0": ["n02123045", "tabby"]}    {"object_type_names": ["tabby", …]}
    """
    path = Path(mapping_file_path)
    if not path.is_file():
        logger.warning("%r is missing. Inference output will not include class name.", path.name)
        return None
    mapping = read_json(path)
    try:
        if isinstance(mapping, dict) and _NAME_LIST in mapping:
            mapping = {str(index): name for index, name in enumerate(mapping[_NAME_LIST])}
        return {index: _name_of(label) for index, label in mapping.items()}
    except (AttributeError, TypeError) as error:
        raise ValueError(
            f'{path.name}: index->name JSON mapping should be in "class": "label" format.'
        ) from error
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from error


def _name_of(label: Any) -> str:
    name = label[-1] if isinstance(label, list) and label else label
    if not isinstance(name, str):
        raise ValueError(  # noqa: TRY004 - the file's content is wrong, not an argument's type
            "labels in index->name mapping must be either str or List[str]"
        )
    return name


def map_class_to_label(
    probs: list[list[Any]],
    mapping: dict[str, str] | None = None,
    lbl_classes: Iterable[Sequence[int]] | None = None,
) -> list[dict[str, Any]]:
    """Return ``{name: value}`` for each row of values.

    ``lbl_classes`` has the class indices of each row, by default 0, 1, 2, …. Without a mapping the
    index is the name; a class that the mapping lacks is a KeyError.
    """
    if not isinstance(probs, list):
        raise TypeError(f"probs is a list with one row per request, not {type(probs).__name__}")
    if mapping is not None and not isinstance(mapping, dict):
        raise TypeError(f"mapping is a dict or None, not {type(mapping).__name__}")
    classes = lbl_classes if lbl_classes is not None else (range(len(row)) for row in probs)
    return [
        {
            str(index) if mapping is None else mapping[str(index)]: value
            for index, value in zip(indices, row, strict=False)
        }
        for row, indices in zip(probs, classes, strict=False)
    ]


def deprecated(
    version: str, replacement: str = "", klass: type[Warning] = PendingDeprecationWarning
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator that warns at each call of the function."""

    def mark(function: Callable[P, T]) -> Callable[P, T]:
        sentence = f"{function.__name__} is deprecated since version {version}."
        if replacement:
            sentence += f" Use {replacement} instead."

        @functools.wraps(function)
        def warn(*args: P.args, **kwargs: P.kwargs) -> T:
            warnings.warn(sentence, klass, stacklevel=2)
            return function(*args, **kwargs)

        return warn

    return mark


def send_intermediate_predict_response(
    ret: Sequence[Any],
    req_id_map: Mapping[int, str] | None,
    message: str,
    code: int,
    context: Any,
) -> None:
    """Send pieces of a batch's answers, from rank 0 only; `handle` returns the last piece.

    ``ret`` has one result per request, ``req_id_map`` is ``context.request_ids``. A ``code`` other
    than 200 ends the answers with a failure, and clients receive ``message``.
    """
    send_pieces(ret, req_id_map, message, code, context)


def yaml_config_of(owner: Any) -> Mapping[str, Any]:
    """Return the ``model_yaml_config`` of a context or handler; empty without one.

    Contexts of tests lack it, or have a mock in its place.
    """
    config = getattr(owner, "model_yaml_config", None)
    return config if isinstance(config, Mapping) else {}


def value_of(row: Any) -> Any:
    """Return the ``data`` of a request, else its ``body``; without ``get``, the request itself."""
    if not hasattr(row, "get"):
        return row
    data = row.get("data")
    is_empty = isinstance(data, str | bytes | bytearray) and not data
    return row.get("body") if data is None or is_empty else data
