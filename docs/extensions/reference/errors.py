"""The errors that clients see."""

import inspect

from marserve.frontend import errors
from marserve.frontend.errors import ServeError
from reference.markdown import code, sentence, table


def error_table() -> str:
    """Return a table of errors with status and TorchServe's type."""
    classes = [item for _, item in inspect.getmembers(errors, inspect.isclass)]
    found = [item for item in classes if issubclass(item, ServeError) and item is not ServeError]
    found.sort(key=lambda item: (item.status, item.__name__))
    rows = ((code(item.wire_type), _status(item), _what(item)) for item in found)
    return table(["`type`", "Status", "What happened"], rows)


def _status(error: type[ServeError]) -> str:
    return "the worker's" if error is errors.PredictionFailed else str(error.status)


def _what(error: type[ServeError]) -> str:
    # Docstrings write code between double backquotes, Markdown between single ones.
    first = (inspect.getdoc(error) or "").partition("\n\n")[0]
    return sentence(first.replace("``", "`"))
