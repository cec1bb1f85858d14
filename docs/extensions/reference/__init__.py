"""Inserts text generated from the code into the pages of the reference.

The comment ``<!-- generated: NAME -->`` marks the place. The text replaces it and the line above,
which says how to get the text.
"""

import re
from collections.abc import Callable, Mapping

from sphinx.application import Sphinx

from reference.commands import commands
from reference.doctor import comparison_rules, doctor_rules
from reference.endpoints import endpoints
from reference.errors import error_table
from reference.metrics import metrics
from reference.names import torchserve_names
from reference.settings import configuration_keys, environment, model_settings

_MARK = re.compile(r"^.+\n<!-- generated: (.+?) -->$", re.MULTILINE)
_GENERATED: Mapping[str, Callable[[], str]] = {
    "command line": commands,
    "comparison rules": comparison_rules,
    "configuration keys": configuration_keys,
    "doctor rules": doctor_rules,
    "endpoints": endpoints,
    "environment variables": environment,
    "errors": error_table,
    "metrics": metrics,
    "model settings": model_settings,
    "TorchServe's names": torchserve_names,
}


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("source-read", _fill)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _fill(_app: Sphinx, _page: str, source: list[str]) -> None:
    source[0] = _MARK.sub(lambda mark: _GENERATED[mark[1]](), source[0])
