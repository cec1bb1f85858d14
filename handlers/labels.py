"""index_to_name.json: from the index of a class to the name that clients read.

Three forms are in use; all become ``{"0": name, …}``:

    {"0": "tabby"}    {"0": ["n02123045", "tabby"]}    {"object_type_names": ["tabby", …]}
"""

import json
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_NAME_LIST = "object_type_names"


def load_label_mapping(mapping_file_path: str | Path) -> dict[str, str] | None:
    """Read an index_to_name.json.

    Returns:
        Index as text to name; None, with a warning, when there is no such file.

    Raises:
        ValueError: The file holds something else than one of the three forms.
    """
    path = Path(mapping_file_path)
    if not path.is_file():
        logger.warning(
            "%r is missing. Inference output will not include class name.", str(mapping_file_path)
        )
        return None
    mapping = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(mapping, dict):
        raise ValueError(  # noqa: TRY004 - the file's content is wrong, not an argument's type
            'index->name JSON mapping should be in "class": "label" format.'
        )
    if _NAME_LIST in mapping:
        mapping = {str(index): name for index, name in enumerate(mapping[_NAME_LIST])}
    return {index: _name_of(label) for index, label in mapping.items()}


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
    """Put names to the values of every row.

    Args:
        probs: One row of values per request.
        mapping: Index as text to name; without it the index is the name.
        lbl_classes: One row of class indices per row of values; by default 0, 1, 2, …

    Returns:
        One ``{name: value}`` per row, in the order of the values.

    Raises:
        TypeError: ``probs`` is not a list, or ``mapping`` not a dict.
        KeyError: The mapping lacks a class.
    """
    if not isinstance(probs, list):
        raise TypeError(f"probs is a list with one row per request, not {type(probs).__name__}")
    if mapping is not None and not isinstance(mapping, dict):
        raise TypeError(f"mapping is a dict or None, not {type(mapping).__name__}")
    classes = lbl_classes if lbl_classes is not None else (range(len(row)) for row in probs)
    return [
        {_label(index, mapping): value for index, value in zip(indices, row, strict=False)}
        for row, indices in zip(probs, classes, strict=False)
    ]


def _label(index: int, mapping: dict[str, str] | None) -> str:
    return str(index) if mapping is None else mapping[str(index)]
